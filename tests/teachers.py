"""Teachers of the tests, and batches that have one."""

from __future__ import annotations

import math
from typing import Any

import torch
from helpers import Batch, make_batch, off_policy
from torch import Tensor

import grpo_kernels as gk

TEACHER_WIDTH, VOCAB = 40, 67
MODES = ("tail", "renormalize")
KINDS = ("whole", *MODES)  # of teachers
OWN = tuple(f"own {mode}" for mode in MODES)  # whole ones, on the policy's likeliest ids


def make_teacher(
    shape: tuple[int, ...], vocab: int = VOCAB, dtype: torch.dtype = torch.float32, **options: Any
) -> gk.Teacher:
    g = torch.Generator().manual_seed(9)
    hidden = torch.randn(*shape, TEACHER_WIDTH, generator=g)
    weight = torch.randn(vocab, TEACHER_WIDTH, generator=g) * 0.3
    bias = torch.randn(vocab, generator=g) * 0.5
    return gk.Teacher(*(x.to(dtype) for x in (hidden, weight, bias)), **options)


def make_top_k(shape: tuple[int, ...], mode: str, k: int = 5, vocab: int = VOCAB) -> gk.TopKTeacher:
    """In any order; all but the first few of a token may be missing."""
    g = torch.Generator().manual_seed(11)
    log_q = (torch.randn(*shape, vocab, generator=g) * 2).log_softmax(-1)
    ids = log_q.topk(k, -1).indices
    ids = ids.gather(-1, torch.rand(ids.shape, generator=g).argsort(-1))
    logps = log_q.gather(-1, ids)
    if k < vocab:
        missing = torch.rand(ids.shape, generator=g) < 0.3
        missing[..., k // 2] = False
        ids, logps = ids.masked_fill(missing, -1), logps.masked_fill(missing, -math.inf)
    return gk.TopKTeacher(ids, logps, mode)


def teacher_of(kind: str, k: int = 5, shape: tuple[int, ...] = (6, 6), **options: Any) -> gk.Teacher | gk.TopKTeacher:
    """Of one of KINDS or OWN."""
    if kind in MODES:
        return make_top_k(shape, kind, k)
    own = {} if kind == "whole" else dict(top_k=k, mode=kind.removeprefix("own "))
    return make_teacher(shape, **own, **options)


def batch_of(config: gk.GRPOConfig | None = None, **options: Any) -> Batch:
    """Off-policy, masked, with a bias, a sequence with an advantage of 0 and a teacher."""
    batch = off_policy(make_batch(2, sequences=6, bias=True, masked=True), config)
    batch.advantages[1] = 0.0
    return batch.with_options(teacher=make_teacher((6, 6), **options))


def config_of(divergence: str, **options: Any) -> gk.GRPOConfig:
    beta = {"divergence_beta": 0.3} if divergence == "jsd" else {}
    return gk.GRPOConfig(distill_coef=0.7, divergence=divergence, **beta, **options)


def exact_log_p(batch: Batch, *, temperature: Any = 1.0, logit_scale: float = 1.0, logit_softcap: Any = None) -> Tensor:
    """(..., V) of what the batch holds, in its type."""
    z = logit_scale * (batch.hidden @ batch.weight.T + (0.0 if batch.bias is None else batch.bias))
    z = z if logit_softcap is None else logit_softcap * (z / logit_softcap).tanh()
    temperature = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    return (z / temperature).log_softmax(-1)
