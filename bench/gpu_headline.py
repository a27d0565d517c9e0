"""The headline: a step of ours beside the three bare matrix products, in interleaved rounds.

A step is forward and backward: loss, log-probabilities, gradients of hidden states and weight. Batch, products and
rounds are those of `grpo-kernels bench`. Before it is timed, each is compared with float64 on a sample of its rows.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gpu_device
import torch
from gpu_device import at, say
from gpu_events import HEADS
from torch import Tensor

from grpo_kernels import GRPOConfig, fused_grpo_loss
from grpo_kernels.backends.strategy import VARIABLE
from grpo_kernels.benchmarks.cases import make_case
from grpo_kernels.benchmarks.implementations import Result, gradients, implementations
from grpo_kernels.benchmarks.inputs import ADVANTAGE_EPS, EPSILON, Inputs, make_inputs, token_losses
from grpo_kernels.benchmarks.measure import interleave
from grpo_kernels.benchmarks.reference import off_policy
from grpo_kernels.benchmarks.witness import witness

ROUNDS, SWEPT_ROUNDS = 5, 3
CHUNK_ROWS = (2048, 4096, 5632, 8192, 16384)
KEPT_IDS = (32, 8, 512)  # of a token's sampling mask
SAMPLE = 64  # rows, and columns, that are compared
LOGP_TOLERANCE, GRADIENT_TOLERANCE = 1e-2, 3e-2
FLOOR = "three products"
OURS = "ours"  # backend="auto": what a user gets


class Right(NamedTuple):
    """What a step has to give, in float64. The rows of dweight are those that depend on small probabilities alone: an
    error there does not show in dhidden, whose norm is nearly all of the sampled ids' making."""

    rows: Tensor
    logps: Tensor
    dhidden: Tensor
    columns: Tensor
    dweight: Callable[[Tensor], Tensor]


def headline(names: Sequence[str], head: str) -> dict[str, Any]:
    """`names`: "ours", or backend/strategy."""
    inputs = batch(head)
    return timed(head, inputs, {name: make_step(name) for name in names}, ROUNDS)


def sweep(names: Sequence[str], head: str) -> dict[str, Any]:
    """Rows per chunk: fewer passes over dW and fuller waves against memory."""
    inputs = batch(head)
    tokens = inputs.ids.numel()
    steps = {f"{name} {rows}": make_step(name, rows) for name in names for rows in CHUNK_ROWS if rows <= tokens}
    return timed(head, inputs, steps, SWEPT_ROUNDS)


def kept(names: Sequence[str], head: str) -> dict[str, Any]:
    """`names`: backend/kept. Every token has a sampling mask: products over its ids, beside those over all."""
    for count in KEPT_IDS:
        timed(head, batch(head, count), {f"{name} {count}": make_step(name) for name in names}, SWEPT_ROUNDS)
    return {}


def batch(head: str, kept_ids: int = 0) -> Inputs:
    at("inputs")
    case = make_case(f"{head}:{HEADS[head]}", "bfloat16", kept_ids=kept_ids)
    return off_policy(make_inputs(case, torch.device(gpu_device.PLACE)))


def make_step(name: str, chunk_rows: int | None = None) -> Callable[[Inputs], Result]:
    backend, _, strategy = ("auto", "", "") if name == OURS else name.partition("/")
    strategy = strategy.replace("kept", "rows")  # which is left to its cost model

    def step(inputs: Inputs) -> Result:
        if strategy:
            os.environ[VARIABLE] = strategy
        else:
            os.environ.pop(VARIABLE, None)
        config = GRPOConfig(
            aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON,
            advantage_eps=ADVANTAGE_EPS, chunk_rows=chunk_rows,
        )  # fmt: skip
        out = fused_grpo_loss(
            inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, old_logps=inputs.old_logps,
            ref_logps=inputs.ref_logps, rewards=inputs.rewards, num_generations=inputs.generations, config=config,
            sampling_mask=inputs.sampling_mask, backend=backend,
        )  # fmt: skip
        return gradients(out.loss, inputs, out.logps)

    return step


def timed(head: str, inputs: Inputs, steps: dict[str, Callable[[Inputs], Result]], rounds: int) -> dict[str, Any]:
    """Those that are right, with the floor; says what each took. AssertionError where one was wrong."""
    right, wrong = sampled(inputs), []
    ready, ran = {}, {}
    at(FLOOR)
    floor = implementations()["floor"].settings(inputs, "step")[""]
    ready[FLOOR] = functools.partial(floor, inputs)
    ready[FLOOR]()
    for name, step in steps.items():
        at(name)
        try:
            with witness() as calls:
                error = why_wrong(right, step(inputs))
            ran[name] = dict(calls)
            error = error or why_other(name, ran[name])
        except torch.OutOfMemoryError as full:
            error = gpu_device.describe(full)
            gpu_device.free_memory()
        if error:
            wrong.append(f"{name}: {error}")
            say(head=head, name=name, error=error)
        else:
            ready[name] = functools.partial(step, inputs)
    del right
    deadline = time.time() + 60.0
    found = interleave(ready, rounds, torch.device(gpu_device.PLACE), deadline, at)
    floor_ms = 1e3 * found[FLOOR]["seconds"]["median"]
    for name, one in found.items():
        times = [1e3 * x for x in one["seconds"]["times"]]
        median = statistics.median(times)
        shape = {"tokens": inputs.ids.numel(), "hidden_size": inputs.hidden.shape[-1], "vocab_size": len(inputs.weight)}
        say(
            head=head, **shape, name=name, milliseconds=median, ratio_to_floor=median / floor_ms, times=times,
            ran=ran.get(name),
        )  # fmt: skip
    assert not wrong, "; ".join(wrong)
    return {}


def why_other(name: str, ran: dict[str, int]) -> str:
    """Why this is not what its name says, by what was called."""
    if name == OURS:
        return "" if ran else "nothing of any backend was called"
    backend, _, rest = name.partition("/")
    methods = {"anchored": "anchored", "kept": "kept_logits"}
    wanted = f"{backend}.{methods.get(rest.split(' ')[0], 'single_pass')}"
    others = [call for call in ran if not call.startswith(f"{backend}.")]
    return "" if wanted in ran and not others else f"what ran was {ran}"


def sampled(inputs: Inputs) -> Right:
    """Of rows spread over the batch, and of columns spread over the vocabulary that no row has sampled."""
    count, length = inputs.ids.numel(), inputs.ids.shape[1]
    vocab, ids = len(inputs.weight), inputs.ids.reshape(-1)
    rows = torch.arange(0, count, max(1, count // SAMPLE), device=gpu_device.PLACE)
    weight = inputs.weight.detach()
    h = inputs.flat_hidden.detach()[rows].double().requires_grad_()
    logits = h @ weight.double().T
    masked_out = inputs.masked_out(rows)
    if masked_out is not None:
        logits = logits.masked_fill(masked_out, -torch.inf)
    logps = logits.log_softmax(-1).gather(1, ids[rows, None])[:, 0]
    old, ref = (x.reshape(-1).double() for x in (inputs.old_logps, inputs.ref_logps))
    advantages = inputs.advantages.double().repeat_interleave(length)

    def loss(logps: Tensor, which: Tensor | slice) -> Tensor:
        return token_losses(logps, old[which], ref[which], advantages[which], inputs.beta).sum() / count

    (dhidden,) = torch.autograd.grad(loss(logps, rows), h)
    columns = torch.arange(0, vocab, max(1, vocab // SAMPLE), device=gpu_device.PLACE)
    columns = columns[~torch.isin(columns, ids)]

    def dweight(all_logps: Tensor) -> Tensor:
        """(columns, H), given the log-probabilities of all rows: they say what each row's sum of exponentials is."""
        leaf = all_logps.detach().reshape(-1).double().requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf, slice(None)), leaf)
        hidden = inputs.flat_hidden.detach()
        lse = (hidden.float() * weight[ids].float()).sum(1).double() - leaf.detach()
        wide = hidden.double()
        p = (wide @ weight[columns].double().T - lse[:, None]).exp()
        out = inputs.masked_out(torch.arange(count, device=gpu_device.PLACE))
        if out is not None:
            p = p.masked_fill(out[:, columns], 0.0)
        return (-g[:, None] * p).T @ wide

    return Right(rows, logps.detach(), dhidden, columns, dweight)


def why_wrong(right: Right, result: Result) -> str:
    assert result.logps is not None and result.dhidden is not None and result.dweight is not None
    error = float((result.logps.reshape(-1)[right.rows] - right.logps).abs().max())
    dhidden = result.dhidden.reshape(-1, right.dhidden.shape[1])[right.rows]
    off = relative(dhidden, right.dhidden), relative(result.dweight[right.columns], right.dweight(result.logps))
    finite = bool(result.dweight.isfinite().all())
    if error <= LOGP_TOLERANCE and max(off) <= GRADIENT_TOLERANCE and finite:
        return ""
    return (
        f"wrong result: logps off by {error:.1e}, dhidden by {off[0]:.1e}, dweight by {off[1]:.1e}"
        + (", and not all of it is finite" if not finite else "")
    )  # fmt: skip


def relative(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm().clamp(min=1e-30))
