"""The Triton kernels. Nothing here is imported before the Triton backend is asked for.

objective.py    the loss of a token and its derivatives: one function per surrogate and per KL estimator
rows.py         rows of logits: statistics, gradient, and both in one launch
divergence.py   log-probabilities beside a teacher's, and the slope of their divergence
teacher.py      rows of logits beside a teacher's: the divergence
sparse.py       the gradient of rows of logits as few pairs of an id and a number
matmul.py       tiles of a product in registers: what the next two share
linear_logp.py  hidden states to log-probabilities, without logits
anchored.py     hidden states to exponentials relative to the sampled token: the fused way without a row pass
plan.py         what each token needs: its weights, whether it counts, its place in the order of rows
tokens.py       the objective of tokens by themselves; sums over sequences, groups, the batch
sequences.py    the objective of tokens that depend on their sequence
layout.py       places of the fields of a token
arguments.py    what kernels take together, and what may travel in a tuple
maths.py        functions that Triton lacks on one of its targets
launch.py       block shapes and warps, from the table launch.json; preferred strategies

Triton compiles a kernel again for an integer that is 1 (a constant then) or divisible by 16, and for a pointer that is
not on 16 bytes. Whatever follows from the number of rows of a call is excluded from that (do_not_specialize): counts,
parts, the token where a chunk starts, views of what holds a number per token or per sequence. A captured CUDA graph
cannot compile, and its warm-up had other rows. Tensors of that kind in a tuple always begin on 16 bytes instead. What
the lm_head determines stays specialised: wide loads need its divisors.
"""

from __future__ import annotations

import os

OLDEST_TRITON = (3, 4)  # that of torch 2.8


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors: for tests, thousands of times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_unusable() -> str:
    """The reason why Triton kernels cannot run here, or nothing."""
    import torch

    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        wanted = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {triton.__version__} is older than {wanted}, which comes with torch 2.8"
    if not interpreted() and not torch.cuda.is_available():
        return "Triton needs a GPU, and torch sees none"
    return ""
