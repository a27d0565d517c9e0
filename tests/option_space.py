"""The space of options that test_variants.py walks: axes in full, the other options drawn per point, kinks avoided; the
errors of eager float32 there."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from helpers import MASK_PATHS, Batch, Result, errors, make_batch, make_sampling_mask, packed, reference, true_logps
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.config import AGGREGATIONS, KL_ESTIMATORS, SURROGATE_RULES
from grpo_kernels.reference import reference_loss_from_logps

OPTIONS: dict[str, tuple[Any, ...]] = {
    "mask": ("none", "ragged"),
    "old": ("given", "none"),
    "ref": ("beta", "metrics", "none"),
    "rollout_weights": ("none", "token", "sequence"),
    "token_weights": ("none", "token", "sequence"),
    "rollout_logps": ("none", "given"),
    "advantages": ("sequence", "column", "token"),
    "layout": ("batch", "packed"),
    "bias": (False, True),
    "softcap": (None, 2.0),
    "temperature": (1.0, 0.8, "per token"),
    "logit_scale": (1.0, 0.7),
    "delta": (None, 1.5),
    "dual_clip": (None, 1.7),
    "dppo_kl_tau": (None, 0.0, 0.01),
    "ratio_cap": (None, 1.2),
    "log_ratio_clamp": (None, 0.5),
    "kl_clamp": (None, 0.3, (0.6, 0.25)),
    "kl_factor": (None, "use_bias_correction_kl", "kl_score_term"),
    "entropy": (None, "token_mean", "loss", "kept only"),
    "entropy_threshold": ("none", "number", "tensor"),
    "off_policy_mask": (None, 0.02),
    "normalizer": ("none", "number", "tensor", "num_items"),
    "sampling_mask": ("none", *MASK_PATHS),
}


class Point(NamedTuple):
    surrogate: str
    level: str
    kl: str
    aggregation: str


POINTS = [
    Point(surrogate, level, kl, aggregation)
    for surrogate, rule in SURROGATE_RULES.items()
    for level, kl, aggregation in itertools.product(rule.levels, KL_ESTIMATORS, AGGREGATIONS)
]


Case = tuple[Point, int]  # the int: which variation of the options that are drawn
CHUNK_ROWS = (3, 7, None)  # shorter than a sequence; longer; everything at once


def name_of(case: Case) -> str:
    point, variation = case
    return f"{'-'.join(point)}-{variation}"


def choose(point: Point, variation: int) -> dict[str, Any]:
    """The options of a point. Variation 0 always has old_logps and, with a KL estimator, its gradient."""
    rng = random.Random(f"{point}{variation}")
    chosen = {name: rng.choice(values) for name, values in OPTIONS.items()}
    if variation == 0:
        chosen |= {"old": "given", "ref": "beta"}
    if point.surrogate != "clip":
        chosen |= {"delta": None, "dual_clip": None}
    if "ratio_cap" not in SURROGATE_RULES[point.surrogate].options:
        chosen |= {"dppo_kl_tau": None, "ratio_cap": None}
    if point.kl == "none":
        chosen["ref"] = chosen["ref"].replace("beta", "metrics")
    elif point.kl != "k3":  # the default
        chosen["ref"] = chosen["ref"].replace("none", "metrics")
    if point.kl == "none" or chosen["ref"] == "none":
        chosen |= {"kl_factor": None, "kl_clamp": None}
    if chosen["kl_factor"] == "kl_score_term" and (point.kl.endswith("+") or chosen["ref"] != "beta"):
        chosen["kl_factor"] = None
    if SURROGATE_RULES[point.surrogate].divides_by_rollout and chosen["old"] == "none":
        chosen["rollout_logps"] = "given"
    if point.aggregation != "num_items" and chosen["normalizer"] == "num_items":
        chosen["normalizer"] = "tensor"
    return chosen


def values_of(case: Case) -> set[tuple[str, Any]]:
    """The values at a point: (axis, value). Surrogate and level are one axis as well."""
    point = case[0]
    return {*point._asdict().items(), *choose(*case).items(), ("surrogate and level", point[:2])}


def covering(cases: list[Case], single: tuple[str, ...] = ()) -> list[Case]:
    """Some of the cases, greedily chosen, in which each pair of values that these have occurs: what is wrong for one
    value, or for two together, fails in one of them. Of the axes `single` each value occurs, with whatever others."""
    found = [values_of(case) for case in cases]
    values = sorted(set().union(*found), key=repr)
    has = torch.tensor([[value in of_case for value in values] for of_case in found]).float()
    in_pairs = torch.tensor([axis not in single for axis, _ in values])
    missing = (has.T @ has) * (in_pairs & in_pairs[:, None] | torch.eye(len(values), dtype=torch.bool)) > 0
    chosen = []
    while missing.any():
        best = ((has @ missing.float()) * has).sum(1).argmax()
        chosen.append(cases[best])
        missing &= has[best].outer(has[best]) == 0
    return chosen


CASES = covering([(point, variation) for variation in range(3) for point in POINTS])
# For kernels of GPUs, which are slow without one and know no loss: every pair of the options, and every loss.
KERNEL_CASES = covering(CASES, single=(*Point._fields, "surrogate and level"))


def build(point: Point, chosen: dict[str, Any], vocab: int = 37) -> tuple[Batch, gk.GRPOConfig]:
    """A batch and its configuration, away from every kink: branches flip there in any implementation."""
    for attempt in range(100):
        batch, config = _draw(point, chosen, random.Random(f"{point}{chosen}{attempt}").randrange(2**31), vocab)
        if is_smooth(batch, config):
            return batch, config
    raise AssertionError(f"no smooth batch for {point}, {chosen}")


def _draw(point: Point, chosen: dict[str, Any], seed: int, vocab: int) -> tuple[Batch, gk.GRPOConfig]:
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g)

    # A fifth of the tokens or so are masked; one sequence has no token at all.
    masked, bias = chosen["mask"] == "ragged", chosen["bias"]
    per_token = chosen["advantages"] == "token"
    batch = make_batch(seed, sequences=5, vocab=vocab, bias=bias, masked=masked, per_token=per_token)
    batch.weight *= 0.5  # |logp| < 4 or so: float32 rounds it to 1e-7, and sums of those to well below 1e-6
    batch.advantages = batch.advantages.abs().add(0.2) * torch.where(normal(*batch.advantages.shape) > -0.5, 1, -1)
    batch.advantages[-1] = 0.0
    if chosen["advantages"] == "column":
        batch.advantages = batch.advantages[:, None]
    if masked:
        batch.options["completion_mask"][0, :2] = torch.tensor([False, True])  # a hole, as tool tokens leave
    if chosen["sampling_mask"] != "none":
        batch.options["sampling_mask"] = make_sampling_mask(tuple(batch.ids.shape), vocab, seed)
    temperature = chosen["temperature"]
    if temperature == "per token":
        temperature = torch.rand(batch.ids.shape, generator=g) + 0.6
    logits = dict(temperature=temperature, logit_scale=chosen["logit_scale"], logit_softcap=chosen["softcap"])
    logps, entropy = true_logps(batch, gk.GRPOConfig(**logits))
    shape = logps.shape
    # Exponentials of sums over a sequence blow rounding errors up; they need no wide spread to leave the clip range.
    spread = 0.2 if point.surrogate == "vespo" or point.level == "sequence_sum" else 0.4
    if chosen["old"] == "given":
        batch.options["old_logps"] = (logps + spread * normal(*shape)).float()
    if chosen["ref"] != "none":
        batch.options["ref_logps"] = (logps + 0.5 * normal(*shape)).float().clamp(max=0.9)
    if chosen["rollout_logps"] == "given":
        unknown = torch.rand(shape, generator=g) < 0.1
        batch.options["rollout_logps"] = (logps + spread * normal(*shape)).float().clamp(max=0.9)
        batch.options["rollout_logps"].masked_fill_(unknown, torch.nan)
    for name in ("rollout_weights", "token_weights"):
        if chosen[name] != "none":
            size = shape if chosen[name] == "token" else shape[:1]
            weights = torch.rand(size, generator=g) * 1.5 + 0.3
            weights.view(-1)[1] = 0.0  # a token, or a sequence, that a mask took out
            batch.options[name] = weights
    if chosen["normalizer"] == "num_items":
        batch.options["num_items_in_batch"] = torch.tensor(41)
    elif chosen["normalizer"] != "none":
        batch.options["normalizer"] = 17 if chosen["normalizer"] == "number" else torch.tensor(17.0)
        if chosen["entropy"] == "token_mean" and point.aggregation not in ("token_mean", "num_items"):
            batch.options["entropy_normalizer"] = 23
    if chosen["layout"] == "packed":
        if isinstance(temperature, Tensor):
            batch.options["temperature"] = temperature
        lengths = batch.options["completion_mask"].sum(1) if masked else torch.tensor([6, 1, 0, 4, 6])
        if lengths.sum() == len(lengths):  # one value per token could be one per sequence, and is refused
            lengths[-1] = shape[1]
        batch = packed(batch, lengths)
        logits["temperature"] = batch.options.pop("temperature", temperature)

    has_sampler = "given" in (chosen["old"], chosen["rollout_logps"])  # without one the off-policy mask is refused
    threshold = None
    if chosen["entropy_threshold"] != "none" or chosen["entropy"] == "kept only":
        threshold = entropy.quantile(0.3).item()
        if chosen["entropy_threshold"] == "tensor":
            threshold = torch.tensor(threshold)
    kept_only, flat = chosen["entropy"] == "kept only", {}
    if point[:2] == ("vespo", "sequence"):  # a weight that is flat at ratio 1, so that it does not blow errors up
        flat = dict.fromkeys(("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"), 1.0)
    config = gk.GRPOConfig(
        surrogate=point.surrogate,
        importance_sampling_level=point.level,
        kl_estimator=point.kl,
        aggregation=point.aggregation,
        beta=0.3 if chosen["ref"] == "beta" else 0.0,
        delta=chosen["delta"],
        dual_clip=chosen["dual_clip"],
        dppo_kl_tau=chosen["dppo_kl_tau"],
        ratio_cap=chosen["ratio_cap"],
        epsilon_high={"cispo": 1.3, "ipo": 0.002, "dppo_tv": 0.002, "dppo_kl": 5e-4}.get(point.surrogate),
        epsilon_low={"clip": 0.1, "cispo_two_sided": 0.1, "dppo_tv": 0.002, "dppo_kl": 5e-4}.get(point.surrogate),
        log_ratio_clamp=chosen["log_ratio_clamp"],
        kl_clamp=chosen["kl_clamp"],
        **({chosen["kl_factor"]: True} if chosen["kl_factor"] else {}),
        entropy_coef=0.02 if chosen["entropy"] else 0.0,
        entropy_aggregation=None if kept_only else chosen["entropy"],
        entropy_kept_only=kept_only,
        entropy_threshold=threshold,
        off_policy_mask_threshold=chosen["off_policy_mask"] if has_sampler else None,
        max_completion_length=9 if point.aggregation == "fixed_length" else None,
        **logits,
        **flat,
    )
    return batch, config


def rounding_of(point: Point, chosen: dict[str, Any]) -> float:
    """What an error may be beyond that of eager float32.

    Rows that keep few ids have small gradients, beside which the rounding of a product over all ids is large: by the
    order of its sums it is up to 1.5 times that of eager's three orders.
    VESPO multiplies the sum of the rounding errors of a sequence's log-probabilities by k - lambda w, in any backend.
    """
    return 2e-6 if chosen["sampling_mask"] in ("dense", "both") or point.surrogate == "vespo" else 1e-6


def after_logps(batch: Batch) -> dict[str, Any]:
    """The options that a loss from log-probabilities takes."""
    return {name: x for name, x in batch.options.items() if name != "sampling_mask"}


def is_smooth(batch: Batch, config: gk.GRPOConfig, step: float = 5e-5) -> bool:
    """Whether there is a gradient and it, and clip counts, stay as they are when each logp and entropy moves a step."""
    logps, entropy = (x.detach() for x in true_logps(batch, config))
    double = batch.cast(torch.float64)
    seen = []
    for logp_step, entropy_step in itertools.product((-step, step), repeat=2):
        x, h = (logps + logp_step).requires_grad_(), entropy + entropy_step
        out = reference_loss_from_logps(x, double.advantages, entropy=h, config=config, **after_logps(double))
        (gradient,) = torch.autograd.grad(out.loss, x)
        counts = [v for name, v in out.metrics.items() if "clip" in name]
        seen.append((gradient, counts))
    first, counts = seen[0]
    return bool(first.any()) and all(
        bool(((g - first).abs() <= 0.01 * first.abs() + 1e-9).all()) and c == counts for g, c in seen[1:]
    )


# --- errors of eager float32, which bound those of the package --------------------------------------------------------


def renamed(mask: gk.SamplingMask, names: Tensor) -> gk.SamplingMask:
    """The mask with id names[i] (V,) in place of i."""
    rows = [names[row].tolist() for row in mask.ids.long().split(mask.counts.flatten().tolist())]
    return gk.SamplingMask(gk.SamplingMask.from_lists(rows).ids, mask.counts)


def eager_errors(
    batch: Batch,
    config: gk.GRPOConfig,
    exact: Result,
    loss_scale: float = 0.0,
    eager: Callable[[Batch, gk.GRPOConfig], Result] = lambda batch, config: reference(batch, config, torch.float32),
) -> dict[str, float]:
    """Errors of `eager`: the largest of three orders of summation, since one order may be lucky."""
    largest: dict[str, float] = {}
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        columns, rows = (torch.randperm(size, generator=g) for size in (batch.hidden.shape[-1], len(batch.weight)))
        shuffled = dataclasses.replace(
            batch,
            hidden=batch.hidden[..., columns],
            weight=batch.weight[rows][:, columns],
            ids=rows.argsort()[batch.ids],
            bias=None if batch.bias is None else batch.bias[rows],
        )
        if "sampling_mask" in batch.options:
            shuffled = shuffled.with_options(sampling_mask=renamed(batch.options["sampling_mask"], rows.argsort()))
        run = eager(shuffled, config)
        run.grads["hidden"] = run.grads["hidden"][..., columns.argsort()]
        run.grads["weight"] = run.grads["weight"][rows.argsort()][:, columns.argsort()]
        if "bias" in run.grads:
            run.grads["bias"] = run.grads["bias"][rows.argsort()]
        for name, error in errors(run, exact, loss_scale).items():
            largest[name] = max(error, largest.get(name, 0.0))
    return largest
