"""The custom operators under torch.library.opcheck."""

from __future__ import annotations

import pytest
import torch
from helpers import make_batch, off_policy, token_inputs
from teachers import teacher_of
from torch._library.custom_ops import CustomOpDef

import grpo_kernels as gk
from grpo_kernels import rewards
from grpo_kernels.head import logps_op, loss_op
from grpo_kernels.head.shared import statistics_dtype
from grpo_kernels.head.teacher import teacher_to_key
from grpo_kernels.kernels.fused_objective import Sums


def samples(dtype: torch.dtype) -> dict[str, tuple]:
    """Arguments for every operator of the package."""
    batch = off_policy(make_batch(1, bias=True, masked=True, dtype=dtype))
    hidden, weight, bias = (x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias))
    mask, old = batch.options["completion_mask"], batch.options["old_logps"]
    index = torch.tensor([0, 0, 1, 1])
    sampling_mask = gk.SamplingMask.from_padded(torch.arange(batch.weight.shape[0])[::2].expand(4, 6, -1))
    kept = sampling_mask.ids, sampling_mask.counts
    tokens = list(
        token_inputs(
            batch.ids, statistics_dtype(dtype), advantages=batch.advantages, completion_mask=mask, old_logps=old,
            ref_logps=old - 0.1, group_index=index, allowed_ids=kept[0], allowed_counts=kept[1],
        )[0]
    )  # fmt: skip
    key, sparse = (gk.GRPOConfig(beta=0.1, sparse_backward=theta).key for theta in (None, 2**-6))
    name = "torch" if dtype == torch.float64 else "cpu"
    wide = statistics_dtype(dtype)
    logps, entropy = (torch.randn(4, 6, dtype=wide).requires_grad_() for _ in range(2))
    stats = [torch.randn(24, dtype=t) for t in (wide, torch.float64)]
    grads = [torch.randn(4, 6, dtype=wide), torch.zeros(4, 6, dtype=wide)]
    of_tokens, numbers = [batch.ids, mask, None, *kept], [1.0, 1.0, 0.0, 0.0]
    of_k = [torch.stack([batch.ids, batch.ids // 2, batch.ids], -1), mask, None, None, None]
    key_of_teacher, of_teacher = teacher_to_key(teacher_of("own tail", shape=(4, 6), dtype=dtype))
    distilled = [batch.ids, *tokens[:-2], None, None, *of_teacher]
    distils, none = gk.GRPOConfig(distill_coef=0.5).key, ("", gk.GRPOConfig().key)
    of_divergence = [batch.ids, mask, None, None, None, *of_teacher]
    wants = [True, True, True]
    plain = [x.detach() for x in (hidden, weight, bias)]
    return {
        "grpo_loss": (hidden, weight, bias, [batch.ids, *tokens], 2, True, sparse, name, None, wants, ""),
        "grpo_loss, a teacher": (hidden, weight, bias, distilled, 2, True, distils, name, None, wants, key_of_teacher),
        "logps": (hidden, weight, bias, of_tokens, numbers, True, name, None, None, 0, *none),
        "logps, K ids": (hidden, weight, bias, of_k, numbers, True, name, None, None, 0, *none),
        "logps, the likeliest": (*plain, [batch.ids, *of_k[1:]], numbers, False, name, None, None, 3, *none),
        "logps, a teacher": (
            hidden, weight, bias, of_divergence, numbers, False, name, None, None, 0, key_of_teacher, distils
        ),
        "logps_backward": (grads, plain, of_tokens, stats, numbers, name, None, None, *none, wants),
        "logps_backward, K ids": (
            [of_k[0].to(wide), grads[1]], plain, of_k, stats, numbers, name, None, None, *none, wants
        ),
        "logps_backward, a teacher": (
            [*grads, grads[0]], plain, of_divergence, stats, numbers, name, None, None, key_of_teacher, distils, wants
        ),
        "grpo_loss_from_logps": (logps, entropy, [*tokens[:-2], None, None], 2, True, key, name),
        "group_statistics": (torch.rand(4, dtype=wide), index, 2, 0, "group", "mean", 1, 1e-4, True),
    }  # fmt: skip


OPERATORS = {
    x._qualname.removeprefix("grpo_kernels::"): x
    for module in (loss_op, logps_op, rewards)
    for x in vars(module).values()
    if isinstance(x, CustomOpDef)
}


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_opcheck_of_a_fused_loss(backend):
    """The operator returns sums, not a record, where the backend has the loss in one launch."""
    hidden, weight, bias, tokens, groups, per_sequence, _, _, *rest = samples(torch.float32)["grpo_loss"]
    tokens[-2:] = None, None  # of a sampling mask, which is slow in the interpreter
    arguments = hidden, weight, bias, tokens, groups, per_sequence, gk.GRPOConfig(beta=0.1).key, backend, *rest
    torch.library.opcheck(loss_op.grpo_loss, arguments)
    found = loss_op.grpo_loss(*(x.detach() for x in arguments[:3]), *arguments[3:])[3]
    assert found.shape == (Sums.length(4, 2),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", samples(torch.float64))
def test_opcheck(name, dtype):
    torch.library.opcheck(OPERATORS[name.partition(",")[0]], samples(dtype)[name])
