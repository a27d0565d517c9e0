"""python -m grpo_kernels: the same as the command grpo-kernels."""

import sys

from .commands.cli import main

sys.exit(main())
