"""The backend in PyTorch: it runs anywhere, and it is the specification of the others."""
