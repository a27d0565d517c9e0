"""`grpo-kernels bench`: this library against eager PyTorch, its peers and the bare matrix products, on your machine.

ARCHITECTURE.md lists the files.
"""
