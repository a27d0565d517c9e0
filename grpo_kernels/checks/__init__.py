"""Checks of arguments before any work."""
