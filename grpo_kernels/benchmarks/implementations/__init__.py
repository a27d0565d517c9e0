"""The implementations that are compared: ours, plain PyTorch, the peers. One plug-in of one signature each.

To add one: a function in peers.py with the decorator `implementation`.
"""

import importlib

from .base import IMPLEMENTATIONS, Implementation, Result, Step, Unsupported, select

__all__ = ["IMPLEMENTATIONS", "Implementation", "Result", "Step", "Unsupported", "select"]

for _module in ("ours", "torch_", "peers"):  # in the order of the table
    importlib.import_module(f".{_module}", __name__)
