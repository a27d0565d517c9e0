"""Checks of arguments before any work, and what sharded weights become."""
