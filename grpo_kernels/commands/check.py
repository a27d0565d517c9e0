"""`grpo-kernels check`: every variant on every backend in every type of this machine, against float64.

Small batches away from every kink: where branches meet, rounding decides in any implementation. The bound is the error
of eager PyTorch on the same inputs, its logits in the type of the inputs and the rest in float32, plus some slack.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ..config import GRPOConfig
from ..kernels import candidates, unavailable_reason
from ..objective.aggregation import AGGREGATIONS, Aggregation
from ..objective.kl import KL_ESTIMATORS, KLEstimator
from ..objective.sequences import Level
from ..objective.surrogates import SURROGATE_RULES, Surrogate
from .env import collect, render
from .harness import Batch, Result, errors, fused, reference, size_of_loss, true_logps

SEQUENCES, LENGTH, WIDTH, VOCAB = 6, 6, 32, 97
LENGTHS = (6, 5, 6, 3, 1, 6)  # of the unmasked part of each sequence
# What an error may exceed eager's by: 16 units in the last place of float32, two roundings to bfloat16, three quarters
# of one to float16. So small a batch averages little: which of two equally good implementations is closer to the truth
# is chance, most of all for the ratio of a whole sequence, which multiplies the roundings of its tokens.
SLACK = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 4e-4}
# The ratio of a whole sequence multiplies its tokens' ratios, whose roundings add up as a random walk does.
ROUNDINGS = {"sequence_sum": math.sqrt(LENGTH)}
# Log-ratios: inside and outside of the clip range [log 0.8, log 1.2] and of CISPO's cap, 0.06 away from each bound.
LOG_RATIOS = (-0.45, -0.1, 0.1, 0.45)
JITTER = 0.02


class Variant(NamedTuple):
    surrogate: Surrogate
    level: Level
    kl: KLEstimator
    aggregation: Aggregation

    def __str__(self) -> str:
        return "/".join(self)


class Case(NamedTuple):
    """A variant's inputs, whose hidden, weight and bias are in the type that is checked, and exact results.

    `allowed`: eager's errors; `size`: what the error of the loss is relative to.
    """

    variant: Variant
    batch: Batch
    config: GRPOConfig
    exact: Result
    allowed: dict[str, float]
    size: float


def check(backend: str | None = None, *, quick: bool = False) -> bool:
    """Prints the environment and a line per backend, device and type. Returns whether all passed."""
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    asked = [(name, device) for device in devices for name in (candidates(device) if backend is None else (backend,))]
    pairs = [(name, device) for name, device in asked if not unavailable_reason(name, device)]
    print(render(collect()) + "\n")
    if not pairs:
        print(f"backend {backend!r} is not available: {unavailable_reason(str(backend), devices[-1])}")
        return False
    layout = "{:8}{:8}{:10}{:>8}{:>10}{:>9}{:>8}  {:8}{}".format
    print(layout("backend", "device", "type", "variants", "excess", "allowed", "seconds", "verdict", "worst"))
    failures = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for sizes this small, synchronising threads costs more than the work
    try:
        for dtype, slack in SLACK.items():
            cases = [compare_eager(variant, i, dtype) for i, variant in enumerate(variants(quick=quick))]
            for name, device in pairs:
                start = time.perf_counter()
                excess, worst, done, failure = compare(cases, name, device)
                numbers = done, f"{excess:.1e}", f"{slack:.1e}", f"{time.perf_counter() - start:.1f}"
                verdict = "ok" if excess <= slack else "FAILED"
                type_name = str(dtype).removeprefix("torch.")
                print(layout(name, str(device), type_name, *numbers, verdict, worst), flush=True)
                if verdict == "FAILED":
                    failures.append(f"{name} on {device}, {dtype}, {failure}" if failure else "")
    finally:
        torch.set_num_threads(threads)
    print("\n".join(["", *filter(None, failures), f"{len(failures)} lines failed" if failures else "all is well"]))
    return not failures


def variants(*, quick: bool = False) -> list[Variant]:
    """Returns every surrogate at each of its levels with every KL estimator, or with one; aggregations take turns."""
    points = [(name, level) for name in get_args(Surrogate) for level in SURROGATE_RULES[name].levels]
    chosen = [
        (*point, kl)
        for i, point in enumerate(points)
        for kl in ([KL_ESTIMATORS[i % len(KL_ESTIMATORS)]] if quick else KL_ESTIMATORS)
    ]
    return [Variant(*point, AGGREGATIONS[i % len(AGGREGATIONS)]) for i, point in enumerate(chosen)]


def compare_eager(variant: Variant, index: int, dtype: torch.dtype) -> Case:
    """Makes a case: its inputs, their exact results, and the errors of eager PyTorch."""
    batch, config = make_inputs(variant, index, dtype)
    exact, size = reference(batch, config), size_of_loss(batch, config)
    allowed = errors(reference(batch, config, torch.float32, head_dtype=dtype), exact, size)
    return Case(variant, batch, config, exact, allowed, size)


def compare(cases: list[Case], backend: str, device: torch.device) -> tuple[float, str, int, str]:
    """Returns the largest error beyond eager's, where it is, how many variants ran, and what one of them raised."""
    largest, worst = -math.inf, ""
    for done, case in enumerate(cases):
        try:
            case_errors = errors(fused(case.batch, case.config, backend, device), case.exact, case.size)
        except Exception as error:  # any error goes into the report; the other lines continue
            return math.inf, str(case.variant), done, f"{case.variant}: {type(error).__name__}: {error}"
        excess, name = max((error - case.allowed[name], name) for name, error in case_errors.items())
        excess /= ROUNDINGS.get(case.variant.level, 1.0)
        if excess > largest:
            largest, worst = excess, f"{case.variant}: {name}"
    return largest, worst, len(cases), ""


# --- inputs ---------------------------------------------------------------------------------------------------------


def make_inputs(variant: Variant, index: int, dtype: torch.dtype) -> tuple[Batch, GRPOConfig]:
    """Returns a batch and its configuration; `index` decides the random numbers, and options that take turns."""
    g = torch.Generator().manual_seed(index)
    normal, shape = partial(torch.randn, generator=g), (SEQUENCES, LENGTH)
    hidden, weight = normal(*shape, WIDTH), normal(VOCAB, WIDTH) * 0.2
    bias = normal(VOCAB) * 0.5 if index % 3 != 1 else None
    ids = torch.randint(VOCAB, shape, generator=g)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    mask[0, 1] = False  # a hole, as a tool's answer leaves
    advantages = (0.5 + torch.rand(SEQUENCES, generator=g)) * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    temperature = (1.0, 0.8)[index % 2]
    batch = Batch(hidden, weight, ids, advantages, bias).head_as(dtype)
    logps, _ = true_logps(batch, GRPOConfig(temperature=temperature))
    log_ratio = _log_ratios(variant, mask, g)
    old = logps - log_ratio
    # |k1| has a corner at 0
    distance = (0.1 + 0.5 * torch.rand(shape, generator=g)) * torch.where(normal(*shape) > 0, 1.0, -1.0)
    batch = batch.with_options(completion_mask=mask, old_logps=old.float(), ref_logps=(logps + distance).float())
    bounds: dict[str, Any] = {"epsilon_high": 1.3} if variant.surrogate == "cispo" else {}
    if SURROGATE_RULES[variant.surrogate].divides_by_rollout:
        batch = batch.with_options(rollout_logps=old.float())
        p, q = logps.exp(), old.exp()
        kl_of_others = (1 - q) * ((1 - q) / (1 - p)).log()
        distances = q * -log_ratio + kl_of_others if variant.surrogate == "dppo_kl" else (p - q).abs()
        bound = _widest_gap(distances[mask])
        sides = ("epsilon_high",) if variant.surrogate == "ipo" else ("epsilon_low", "epsilon_high")
        bounds = dict.fromkeys(sides, bound)
    config = GRPOConfig(
        surrogate=variant.surrogate,
        importance_sampling_level=variant.level,
        kl_estimator=variant.kl,
        aggregation=variant.aggregation,
        beta=0.0 if variant.kl == "none" else 0.1,
        max_completion_length=LENGTH + 1 if variant.aggregation == "fixed_length" else None,
        temperature=temperature,
        entropy_coef=(0.0, 0.02)[index // 2 % 2],
        chunk_rows=(None, 7, 3)[index % 3],  # in one piece; whole sequences; parts of sequences
        **bounds,
    )
    return batch, config


def _log_ratios(variant: Variant, mask: Tensor, g: torch.Generator) -> Tensor:
    """Returns log-ratios (B, T) float64, of tokens or of the mean or sum of a sequence near one of LOG_RATIOS."""
    by_sequence = variant.level != "token" and variant.surrogate != "gmpo"  # GMPO clips tokens
    shape = (SEQUENCES, 1) if by_sequence else (SEQUENCES, LENGTH)
    values = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    centre = values[torch.randint(len(values), shape, generator=g)]
    jitter = (2 * torch.rand(mask.shape, generator=g, dtype=torch.float64) - 1) * JITTER
    if variant.surrogate == "vespo":  # no clipping; its weight falls as exp(-ratio of the sequence)
        return 0.2 * centre + jitter
    lengths = mask.sum(1, keepdim=True)
    jitter = jitter - (jitter * mask).sum(1, keepdim=True) / lengths if by_sequence else jitter
    return (centre / lengths if variant.level == "sequence_sum" else centre) + jitter


def _widest_gap(x: Tensor) -> float:
    """Returns a bound in the middle of the widest gap, by ratio, in the middle half of the values."""
    x = x.sort().values[len(x) // 4 : -(len(x) // 4)].log()
    i = int(x.diff().argmax())
    return float(((x[i] + x[i + 1]) / 2).exp())
