"""`grpo-kernels demo`: a small transformer learns two-digit addition with `fused_grpo_loss`, offline, in minutes.

task.py    the problems, their characters as tokens, the reward
model.py   the transformer (a transformers configuration), sampling, hidden states
losses.py  one GRPO loss, fused or eager
train.py   supervised warm-up, then the GRPO loop
memory.py  the memory of the loss, against eager's
plot.py    the curves
run.py     all of it in order
"""

from importlib.util import find_spec

PACKAGES = ("transformers", "matplotlib", "tqdm")


def missing_packages() -> list[str]:
    """Names of packages that the demo needs and this environment lacks."""
    return [name for name in PACKAGES if find_spec(name) is None]
