"""This library: the default, and variants of it that are compared with the default."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ... import GRPOConfig, fused_distillation_loss, fused_grpo_loss, fused_logps, fused_top_k, sampling_support
from ...kernels import get_backend, registered_backends, unavailable_reason
from ...names import DIVERGENCES, Divergence
from ...teacher import Teacher
from .baselines import Implementation, Result, Step, Unsupported, make_step
from .inputs import EPSILON, Inputs, nearby_teacher

SHOWN = ("entropy", "sparse/")  # beginnings of the metrics that go into reports
IDS = 100  # per token, in implementations that take several
SUPPORTS: dict[str, dict[str, Any]] = {
    "min_p-0.05": dict(min_p=0.05), "top_k-50": dict(top_k=50), "top_p-0.9": dict(top_p=0.9),
    "top_k-50-top_p-0.9": dict(top_k=50, top_p=0.9),
}  # fmt: skip


def ours(
    inputs: Inputs,
    mode: str,
    backend: str = "auto",
    chunks: int | None = None,
    teacher: dict[str, Any] | None = None,
    teachers: int = 1,
    **options: Any,
) -> Step:
    """Returns the step of the fused loss, of the divergence to the inputs' teacher, or of log-probabilities alone.

    The tokens are cut into `chunks` of equal size. `teacher` has the options of a teacher whose divergence is added to
    the loss, and `options` are those of the configuration. Modes without a GRPO loss refuse these three. Divergences
    are to `teachers` teachers of the inputs' shape, each for an equal part of the tokens.
    """
    if reason := unavailable_reason(backend, inputs.hidden.device) if backend != "auto" else "":
        raise Unsupported(reason)
    if backend != "auto" and mode in DIVERGENCES and not get_backend(backend).takes_teachers:
        raise Unsupported("has no kernels for a teacher")
    if (options or chunks or teacher is not None) and mode not in ("step", "frozen"):
        raise Unsupported("differs from ours in the loss of a step only")
    if chunks:
        options["chunk_rows"] = math.ceil(inputs.ids.numel() / chunks)
    if teacher is not None:
        options["distill_coef"] = 0.5
    loss_teacher = None if teacher is None else nearby_teacher(inputs.hidden, inputs.weight, **teacher)
    config = GRPOConfig(aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON, **options)

    def loss(inputs: Inputs) -> Result:
        output = fused_grpo_loss(
            inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, old_logps=inputs.old_logps,
            ref_logps=inputs.ref_logps if inputs.beta else None, sampling_mask=inputs.sampling_mask,
            advantages=inputs.advantages, config=config, backend=backend, teacher=loss_teacher,
        )  # fmt: skip
        metrics = {name: value for name, value in output.metrics.items() if name.startswith(SHOWN)}
        return Result(output.loss, output.logps if config.score_inactive else None, metrics=metrics)

    def divergence(inputs: Inputs) -> Tensor:
        return fused_distillation_loss(
            inputs.hidden, inputs.weight, **given_teachers, completion_mask=inputs.mask, backend=backend,
            divergence=cast(Divergence, mode),
        ).loss  # fmt: skip

    given_teachers = {"teacher": inputs.teacher} if teachers == 1 else _split(inputs.teacher, teachers)
    return make_step(mode, partial(_logps, backend=backend), loss, divergence)


def _split(teacher: Teacher | None, parts: int) -> dict[str, Any]:
    """Returns the arguments `teacher` and `teacher_of` of teachers with weights of their own, for equal parts of the
    tokens of one."""
    assert teacher is not None
    tokens = teacher.hidden.shape[:-1]
    teacher_of = (torch.arange(tokens.numel(), device=teacher.hidden.device) * parts // tokens.numel()).view(tokens)
    teachers = [Teacher(teacher.hidden[teacher_of == part], teacher.weight.clone()) for part in range(parts)]
    return {"teacher": teachers, "teacher_of": teacher_of}


def _logps(inputs: Inputs, backend: str = "auto") -> Tensor:
    """Returns log-probabilities (B, T) of `fused_logps`."""
    return fused_logps(
        inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, sampling_mask=inputs.sampling_mask,
        backend=backend,
    )[0]  # fmt: skip


def logps_alone(inputs: Inputs, mode: str) -> Step:
    """Returns the step of the objective in plain torch over `fused_logps`, whose backward computes the logits again."""
    return make_step(mode, _logps)


def several(inputs: Inputs, mode: str) -> Step:
    """Returns the step that computes log-probabilities of IDS ids per token, of which the objective takes the first."""
    shape, device = (*inputs.ids.shape, IDS), inputs.ids.device
    generator = torch.Generator(device).manual_seed(3)
    other_ids = torch.randint(len(inputs.weight), shape, device=device, generator=generator)
    ids = torch.cat([inputs.ids[..., None], other_ids[..., 1:]], -1)
    return make_step(mode, lambda inputs: fused_logps(inputs.hidden, inputs.weight, ids)[0][..., 0])


def scoring(inputs: Inputs, mode: str, find: Callable[[Tensor, Tensor, Tensor], Any]) -> Step:
    """Returns the step that calls `find(hidden, weight, ids)` without a gradient."""

    def step(inputs: Inputs) -> Result:
        find(inputs.hidden.detach(), inputs.weight.detach(), inputs.ids)
        return Result()

    return step


def against_engines(inputs: Inputs, mode: str, logits_dtype: torch.dtype) -> Step:
    """Returns the step of `fused_logps` with logits of a type, whose metrics are its mean differences, in nats, to
    engines that round the logits of a bfloat16 head, or have a float32 one (head_dtype), over hidden states that are
    one rounding to bfloat16 away from the trainer's."""
    if logits_dtype not in (torch.float32, inputs.hidden.dtype):
        raise Unsupported(f"does not take {inputs.hidden.dtype} inputs")
    generator = torch.Generator(inputs.hidden.device).manual_seed(5)
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    nudge = 2**-8 * (2 * torch.rand(hidden.shape, generator=generator, device=hidden.device) - 1)
    others = (hidden.float() * (1 + nudge)).to(hidden.dtype)

    def engine(dtype: torch.dtype) -> Tensor:
        logits = (others.to(dtype) @ weight.to(dtype).T).float()
        return logits.log_softmax(-1).gather(-1, inputs.ids[..., None])[..., 0]

    engines = {
        f"mismatch/{name}": engine(dtype) for name, dtype in (("bfloat16", hidden.dtype), ("float32", torch.float))
    }

    def step(inputs: Inputs) -> Result:
        logps = fused_logps(hidden, weight, inputs.ids, logits_dtype=logits_dtype)[0]
        return Result(logps=logps, metrics={name: (logps - x).abs().mean() for name, x in engines.items()})

    return step


def unmasked(inputs: Inputs, mode: str) -> Step:
    """Returns the step of ours without the sampling mask."""
    step = ours(inputs, mode)
    return lambda inputs: step(replace(inputs, sampling_mask=None))


def _table() -> dict[str, Implementation]:
    """Returns this library's implementations, in the order in which they are shown."""
    table = {
        "ours": Implementation("ours", ours),
        "ours-unmasked": Implementation("ours without the sampling mask", unmasked, "none"),
        "ours-unscored": Implementation("ours, score_inactive=False", partial(ours, score_inactive=False)),
    }
    # With uniform ids all probabilities are below 1/64, and 64 entries of a token's gradient are left.
    for name, title, theta in ("sparse", "1/64", 2**-6), *((f"2^-{k}", f"2^-{k}", 2**-k) for k in (8, 10, 12, 14, 16)):
        step = partial(ours, sparse_backward=theta)
        table[f"ours-{name}"] = Implementation(f"ours, sparse_backward={title}", step, estimate=True)
    for chunks in (1, 8):
        table[f"ours-{chunks}-chunks"] = Implementation(f"ours, chunks: {chunks}", partial(ours, chunks=chunks))
    for rows in (1024, 4096):
        table[f"ours-rows-{rows}"] = Implementation(f"ours, chunk_rows={rows}", partial(ours, chunk_rows=rows))
    step = partial(ours, dweight_sum="float32")
    table["ours-dweight-float32"] = Implementation("ours, dweight_sum=float32", step)
    # In float32, because rounding the logits would hide the rounding of sums.
    ours_float32 = partial(ours, logits_dtype=torch.float32)
    table["ours-float32"] = Implementation("ours, logits_dtype=float32", ours_float32)
    for chunks in (1, 2, 4, 8, 16, 32):
        step = partial(ours_float32, chunks=chunks)
        table[f"ours-float32-{chunks}"] = Implementation(f"ours, logits_dtype=float32, chunks: {chunks}", step)
    step = partial(ours_float32, chunks=8, dweight_sum="float32")
    table["ours-float32-sum"] = Implementation("ours, logits_dtype=float32, chunks: 8, dweight_sum=float32", step)
    for mode in "renormalize", "tail":
        step = partial(ours, teacher={"top_k": IDS, "mode": mode})
        table[f"ours-teacher-{mode}"] = Implementation(f"ours, a teacher on {IDS} ids, {mode}", step, "none")
    table["ours-teacher"] = Implementation("ours, a teacher on all ids", partial(ours, teacher={}), "none")
    table["ours-logps"] = Implementation("ours, fused_logps", logps_alone)
    table["ours-several"] = Implementation(f"ours, fused_logps of {IDS} ids", several)
    step = partial(scoring, find=lambda hidden, weight, ids: fused_top_k(hidden, weight, IDS))
    table["ours-top"] = Implementation(f"ours, fused_top_k of {IDS}", step, "none", modes=("forward",))
    for name, rule in SUPPORTS.items():
        step = partial(scoring, find=partial(sampling_support, **rule))
        table[f"ours-{name}"] = Implementation(f"ours, sampling_support {name}", step, "none", modes=("forward",))
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        step = partial(against_engines, logits_dtype=dtype)
        title = f"ours, fused_logps with logits_dtype={name}"
        table[f"ours-head-{name}"] = Implementation(title, step, modes=("forward",))
    step = partial(ours, teachers=10)
    table["ours-10-teachers"] = Implementation("ours, ten teachers of a tenth of the tokens", step, modes=DIVERGENCES)
    for backend in registered_backends():
        table[f"ours-{backend}"] = Implementation(f"ours, backend {backend}", partial(ours, backend=backend))
    return table


OURS = _table()
