"""The Triton kernels. Nothing here is imported before the Triton backend is asked for.

rows.py             rows of logits: statistics and gradient
divergence.py       log-probabilities beside a teacher's, and the derivative of their divergence
teacher.py          rows of logits beside a teacher's: the divergence
exponentials.py     rows of logits to exponentials relative to the sampled id: both in one read and one write
objective.py        the loss of single tokens, its gradient by their log-probabilities, and sums for metrics
sparse.py           the gradient of rows of logits as few pairs of an id and a number
matmul.py           tiles of a product in registers
fused_products.py   hidden states to log-probabilities, or to exponentials, without logits
gathered.py         products over a few ids of each token, gathered rows of the weight
scale.py            finished gradients times a number
maths.py            functions that Triton lacks on one of its targets

Triton compiles a kernel again for an integer that is 1 (a constant then) or divisible by 16, and for a pointer that is
not on 16 bytes. Whatever follows from the number of rows of a call is excluded from that (do_not_specialize): counts,
parts, the token where a chunk starts, views of what holds a number per token. A captured CUDA graph cannot compile, and
its warm-up had other rows. What the lm_head determines stays specialised: wide loads need its divisors.

Kernels take, and hand to the functions that they call, named tuples. A launch gives Triton the fields of a tuple one by
one and specialises all of them: a tuple holds what the lm_head determines and tensors that begin on 16 bytes in every
call, as whole allocations do. Compile-time options that go together are one hashable tuple, a single tl.constexpr.
"""

from __future__ import annotations

import os

from ..operations import Backend

OLDEST_TRITON = (3, 4)  # that of torch 2.8


def why_unusable() -> str:
    """Returns the reason why Triton kernels cannot run here, or ""."""
    import torch

    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}; torch's builds for GPUs bring it, those for CPUs do not"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        wanted = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {triton.__version__} is older than {wanted}, which comes with torch 2.8"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: the interpreter computes bfloat16 wrongly, and is for tests that repair it"
    if not torch.cuda.is_available():
        return "Triton needs a GPU, and torch sees none"
    return ""


def load() -> tuple[Backend | None, str]:
    """Returns (table, "") or (None, the reason why Triton kernels cannot run here)."""
    if reason := why_unusable():
        return None, reason
    from .backend import TRITON

    return TRITON, ""
