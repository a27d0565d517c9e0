"""GRPOConfig: five independent axes (surrogate, ratio level, KL estimator, aggregation, advantages) and their numbers.

A `loss_type` of a trainer is a row of `PRESETS`, nothing else. Field names are TRL's where TRL has one. Sources, papers
or the trainers that define them: of surrogates in reference.py, of presets in VARIANTS.md.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..argument import (
    FLOATS,
    arguments_of,
    as_constant,
    check_count,
    check_ddof,
    check_flag,
    check_number,
    check_one_of,
    check_value,
    no_effect,
    round_float,
)
from ..logit_transform import logit_transform
from ..loss_config import LossConfig
from ..objective.aggregation import AGGREGATIONS, Aggregation, EntropyAggregation
from ..objective.kl import KL_ESTIMATORS, PRODUCTS, KLEstimator
from ..objective.sequences import Level
from ..objective.surrogates import SURROGATE_RULES, Surrogate
from .trainers import advice, left_to_the_loop

__all__ = [  # of the package
    "AGGREGATIONS",
    "DEFAULT_CONFIG",
    "KL_ESTIMATORS",
    "SURROGATE_RULES",
    "GRPOConfig",
    "as_constant",
    "available_presets",
    "check_count",
    "check_ddof",
    "check_flag",
    "check_number",
    "check_one_of",
    "check_option",
    "check_sparse_backward",
    "config_from_key",
    "option_hint",
    "options_of_loss_type",
    "round_float",
]
# Options that belong to some surrogates only. Given to another surrogate, such an option has no effect, so it raises.
_SURROGATE_OPTIONS = tuple(dict.fromkeys(name for rule in SURROGATE_RULES.values() for name in rule.options))


@dataclass(frozen=True)
class GRPOConfig(LossConfig):
    """What `fused_grpo_loss` computes. Frozen and hashable; options left at None take the surrogate's default.

    Two configurations are equal where all options are. Tensors (temperature, entropy_coef, entropy_threshold)
    are compared by identity, as they are hashed: comparing their values would read them back from a GPU.

    Loss
        surrogate: "clip" (PPO, GRPO, DAPO, GSPO, ...), "cispo", "cispo_two_sided", "cispo_mask", "cispo_unified",
            "sapo", "vespo", "reinforce", "gmpo", "dppo_tv", "dppo_kl", "ipo", "a2po".
        importance_sampling_level: "token", "sequence" (mean log-ratio), "sequence_sum" (whole-completion ratio), or
            "sequence_token": the value of "sequence", with the gradient of each token's own ratio (GSPO-token,
            arXiv:2507.18071).
        epsilon_low, epsilon_high: clip range [1 - epsilon_low, 1 + epsilon_high]; for "cispo" epsilon_high is the raw
            cap of the ratio; for "dppo_tv" and "ipo" the bounds on the difference of probabilities, for "dppo_kl" on
            the KL of the sampled id against all others.
        dppo_kl_tau: weight of the squared log-ratio in the three (1e-3; 0: none).
        ratio_cap: c, with which the surrogate of the three is -min(r, c) A logp, the ratio a constant; by default -r A.
        a2po_beta: b, with which "a2po" is (b s - A)^2, s the log-ratio of the sequence (1e-3). A2PO divides by the
            reference policy: give its log-probabilities as old_logps.
        delta: upper bound of the unclipped ratio (two-sided clipping, arXiv:2505.07291); below 1 + epsilon_high, which
            TRL allows, it warns: one of the two cannot act then.
        dual_clip: PPO's dual clip c > 1 (arXiv:1912.09729).
        log_ratio_clamp: bound on |log ratio|, gradient 0 where it acts. Off by default; exponents stop at 80 anyway.
        sapo_temperature_pos/_neg, vespo_k_pos/_k_neg/_lambda_pos/_lambda_neg: as in the papers and TRL.
        off_policy_mask_threshold: drop a sequence with A < 0 whose mean(rollout_logp - logp), in nats, exceeds it.
        entropy_coef: weight of the entropy bonus; a number, or a tensor of one element where a controller on the device
            sets it (see also `entropy_normalizer` of `fused_grpo_loss`).
        entropy_aggregation: "token_mean" (default), the mean over the tokens, or "loss": with the weights of the
            aggregation.
        entropy_kept_only: the bonus is the mean over the tokens that entropy_threshold keeps in this call, which does
            not add up over ranks or micro-batches to that of one batch; costs the logits a second time.
        entropy_threshold: tokens whose entropy (nats) is below lose their surrogate; a number, or a tensor when
            data-parallel ranks share a quantile (see `entropy_quantile`).
    KL to the reference policy
        beta: weight.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+", "k3+" (value of the one, gradient of k2), "none".
        kl_clamp: bound on |KL|, or a pair (bound on |ref_logp - logp|, bound on |KL|), either may be None. The gradient
            is 0 where one acts, but the gradient of "k1+" and "k3+" is k2's without a bound, as in verl.
        use_bias_correction_kl: KL times the importance ratio (DeepSeek-V3.2, arXiv:2512.02556); the product stops at
            exp(80), gradient 0 beyond.
        kl_score_term: KL times exp(logp - stop_gradient(logp)), which is 1: the gradient gets the term through the
            sampling probability (arXiv:2506.09477; NeMo-RL). For "k1", "k2", "k3", "abs".
    Divergence to a teacher's distribution (`teacher` of the call)
        distill_coef: weight c of the divergence D, which is added to the loss of a token like the KL.
        divergence: "reverse_kl" (default) sum p log(p/q), the exact KL of the policy p to the teacher q; "forward_kl"
            sum q log(q/p); "jsd" b KL(q|m) + (1 - b) KL(p|m) with m = (1 - b) p + b q, the generalised Jensen-Shannon
            divergence of GKD, arXiv:2306.13649.
        divergence_beta: b of "jsd", in (0, 1), 0.5 by default.
    Aggregation
        aggregation: "seq_mean", "token_mean", "fixed_length" (needs max_completion_length), "num_items", "seq_sum".
    Logits
        temperature: a number, or a tensor with one element, one per token, or one per sequence, (S,) or (S, 1).
        logit_scale, logit_softcap: applied before the temperature.
        logits_dtype: torch.float32 or the input dtype; None takes the input dtype for bfloat16 on a CPU that has
            products of it (AVX-512, AMX), and float32 for all other 16-bit inputs. Every function that computes logits
            has this option: what is compared, as the two ends of a ratio are, has to be of one type.
        chunk_rows: rows of logits in memory at a time. None: 2,048 to 4,096 on a GPU, of long batches more, within
            1 GiB, of a frozen lm_head on Hopper 1,024 to 2,048; on a CPU 512, of bfloat16 1,366 or more, within
            512 MiB. A loss over whole sequences holds the longest of them, up to 1.5 GiB and 512 MiB.
        dweight_sum: "weight", chunks are added in the type of the weight, or "float32": exact up to one rounding, for a
            (V, H) matrix of float32 more. For 16-bit weights; float16 always has float32 sums.
        static_shapes: compute every row, padding too, so that nothing is read back to the host: for CUDA graphs, whose
            capture switches it on. Off, zero-gradient rows are left out, at the cost of one small read per call.
        score_inactive: also compute logps, entropy and metrics of zero-gradient tokens (one GEMM over their rows).
        sparse_backward: theta in (0, 1), such as 2^-12: of the gradient of the logits only entries of at least theta
            times the row's scale and the sampled id's are kept; smaller ones are rounded to 0 or to theta times the
            scale, right in expectation, and two of the three products become gathers. Equal calls have equal bits; the
            loss and its metrics are exact, as with None. A token with too many entries takes the products.
    Advantages from rewards
        advantage_scale, advantage_baseline, advantage_ddof, advantage_eps: see `group_advantages`. They belong to
            `rewards` of the call; `advantages` that are given in their place are taken as they are.
    """

    # The types of what may be chosen, which stand above LossConfig. Type checkers need the defaults again.
    surrogate: Surrogate = "clip"
    importance_sampling_level: Level | None = None
    kl_estimator: KLEstimator = "k3"
    aggregation: Aggregation = "num_items"
    entropy_aggregation: EntropyAggregation | None = None

    def __new__(cls, *_: Any, **options: Any) -> GRPOConfig:
        for name in options:
            if name not in _OPTIONS:
                raise TypeError(_unknown_option(name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._set("derived", {})
        clamp: Any = self.kl_clamp
        if isinstance(clamp, list):  # which has no hash
            self._set("kl_clamp", tuple(clamp))
        for name, row in OPTIONS.items():
            self._set(name, check_value(name, getattr(self, name), row))
        for i, value in enumerate(self.kl_clamps):
            if value is not None:
                check_number(f"kl_clamp[{i}]", value, above=0.0)
        if self.logits_dtype not in (None, *FLOATS):
            raise ValueError(f"logits_dtype={self.logits_dtype}; expected torch.float32, a 16-bit float type or None")
        self._take_defaults()
        self._check_combinations()
        self._set("key", self._to_key())

    def _take_defaults(self) -> None:
        """Gives options at None the default of the surrogate, or of the divergence, that reads them."""
        rule = SURROGATE_RULES[self.surrogate]
        self._set("importance_sampling_level", self.importance_sampling_level or rule.levels[0])
        if self.importance_sampling_level not in rule.levels:
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} does not go with "
                f"surrogate={self.surrogate!r}; expected one of {rule.levels}"
            )
        for name in _SURROGATE_OPTIONS:
            if getattr(self, name) is not None:
                no_effect(name, getattr(self, name), f"with surrogate={self.surrogate!r}", unless=name in rule.options)
            elif rule.options.get(name, math.inf) != math.inf:
                self._set(name, rule.options[name])
        distils = self.distill_coef != 0.0
        for name in ("divergence", "divergence_beta"):
            no_effect(name, getattr(self, name), "with distill_coef=0", unless=distils)
        if distils:
            self._set("divergence", self.divergence or "reverse_kl")
        no_effect("divergence_beta", self.divergence_beta, f"with {self.divergence!r}", unless=self.divergence == "jsd")
        if self.divergence == "jsd" and self.divergence_beta is None:
            self._set("divergence_beta", 0.5)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"derived": {}}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GRPOConfig):
            return NotImplemented
        return self._options() == other._options()

    def __hash__(self) -> int:
        return hash(self._options())

    def _options(self) -> tuple[Any, ...]:
        values = (getattr(self, f.name) for f in dataclasses.fields(self) if f.compare)
        return tuple(id(x) if isinstance(x, torch.Tensor) else x for x in values)  # == of a tensor is a tensor

    def _check_combinations(self) -> None:
        # A ratio is positive, a probability at most 1: such a bound never acts. GMPO's bound is one of log-ratios.
        for name in ("epsilon_low", "epsilon_high") if self.surrogate in ("dppo_tv", "ipo") else ("epsilon_low",):
            value = getattr(self, name)
            if value is not None and value > 1.0 and self.surrogate != "gmpo":
                raise ValueError(f"{name}={value} with surrogate={self.surrogate!r}; expected a number in [0, 1]")
        crosses = self.delta is not None and self.epsilon_high is not None and self.delta < 1.0 + self.epsilon_high
        if crosses and not torch.compiler.is_compiling():  # a loss that trainers compute, so it is no error
            warnings.warn(
                f"delta={self.delta} is below 1 + epsilon_high with epsilon_high={self.epsilon_high}: epsilon_high has "
                "no effect where the advantage is positive, delta none where it is negative",
                stacklevel=4,
            )
        fixed, has_bonus = self.aggregation == "fixed_length", self.has_entropy_bonus
        why = f"with aggregation={self.aggregation!r}"
        no_effect("max_completion_length", self.max_completion_length, why, unless=fixed)
        no_effect("kl_score_term", self.kl_score_term, "with beta=0", unless=self.beta != 0.0)
        no_effect("entropy_aggregation", self.entropy_aggregation, "with entropy_coef=0", unless=has_bonus)
        if self.kl_estimator == "none" and (self.beta != 0.0 or self.use_bias_correction_kl or self.kl_clamp):
            raise ValueError("kl_estimator='none' contradicts beta != 0, use_bias_correction_kl and kl_clamp")
        if self.kl_score_term and (self.kl_estimator not in PRODUCTS or self.use_bias_correction_kl):
            raise ValueError(
                f"kl_score_term=True with kl_estimator={self.kl_estimator!r} and use_bias_correction_kl="
                f"{self.use_bias_correction_kl}; expected {' or '.join(PRODUCTS)}, and no bias correction, whose ratio "
                "has that gradient already"
            )
        if self.entropy_kept_only:
            if not has_bonus or self.entropy_threshold is None:
                raise ValueError("entropy_kept_only=True needs an entropy_coef and an entropy_threshold")
            if self.entropy_aggregation == "loss":
                raise ValueError("entropy_kept_only=True contradicts entropy_aggregation='loss', its own weights")
        if self.sparse_backward is not None and self.static_shapes:
            raise ValueError("static_shapes=True contradicts sparse_backward, whose number of entries is read")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GRPOConfig:
        """Returns what papers and trainers call `name` (see `available_presets`), with `overrides` on top."""
        check_one_of("preset", name, available_presets())
        return cls(**{**PRESETS[name], **overrides})

    @classmethod
    def from_trl(cls, args: Any, model_config: Any = None, **overrides: Any) -> GRPOConfig:
        """Returns the loss of TRL's GRPOTrainer with `args`, a trl.GRPOConfig of TRL 1.16, with `overrides` on top.

        model_config: `model.config`, whose logit scale and softcap are read (`logit_transform`); None: there are none.

        Read are loss_type, importance_sampling_level, epsilon, epsilon_high, delta, sapo_*, vespo_*, beta,
        use_bias_correction_kl, temperature, max_completion_length, entropy_coef, off_policy_mask_threshold and
        scale_rewards, each where the loss type has it. TRL divides by a count over the accumulated micro-batches; that
        is `normalizer` of the call. What TRL's trainer does outside of the loss is left to the loop that calls it:
        where an option asks for such a thing (importance weights of vLLM, multi_objective_aggregation, reward_weights,
        mask_truncated_completions, cast_lm_head_to_fp32, router_aux_loss_coef, a model with experts, sync_ref_model,
        disable_dropout, neftune_noise_alpha), a UserWarning names it and says how.

        Raises:
            ValueError: what TRL accepts and this loss does not (negative coefficients), by name. What follows from the
            batch: top_entropy_quantile below 1 without entropy_threshold among the overrides (`entropy_quantile`; None
            for no threshold), use_adaptive_entropy without entropy_coef among them.
        """
        trl_options = {**vars(args), "epsilon_low": args.epsilon}
        if args.epsilon_high is None:
            trl_options["epsilon_high"] = args.epsilon
        options = options_of_loss_type(args.loss_type, trl_options)
        for name in options.keys() & {"vespo_lambda_pos", "vespo_lambda_neg"}:
            options[name] = max(options[name], 1e-4)  # TRL's bound
        options |= {name: trl_options[name] for name in ("entropy_coef", "off_policy_mask_threshold")}
        options["advantage_scale"] = args.scale_rewards
        if args.use_adaptive_entropy and "entropy_coef" not in overrides:
            raise ValueError("use_adaptive_entropy=True: the coefficient follows the entropy; pass entropy_coef=")
        if args.top_entropy_quantile < 1.0 and "entropy_threshold" not in overrides:
            raise ValueError(
                f"top_entropy_quantile={args.top_entropy_quantile}: the threshold follows from the entropies of the "
                "batch; pass entropy_threshold=entropy_quantile(...), or None"
            )
        coefficient, threshold = ({**options, **overrides}.get(x) for x in ("entropy_coef", "entropy_threshold"))
        if threshold is not None and (isinstance(coefficient, torch.Tensor) or coefficient):
            options["entropy_kept_only"] = True
        if model_config is not None:
            options["logit_scale"], options["logit_softcap"] = logit_transform(model_config)
        for sentence in left_to_the_loop(vars(args), model_config):
            warnings.warn(f"GRPOConfig.from_trl: {sentence}", stacklevel=2)
        return cls(**{**options, **overrides})

    def _to_key(self) -> str:
        # Spelled out with f-strings: torch.compile can follow those, so that a config may be made inside a graph.
        parts = []
        for f in dataclasses.fields(self):
            value = as_constant(getattr(self, f.name))
            if not f.init or isinstance(value, torch.Tensor) or value == f.default:
                continue
            text = f"'{value}'" if isinstance(value, torch.dtype) else f"{value!r}"
            parts.append(f"{f.name}={text}")
        return ";".join(parts)


@lru_cache(maxsize=256)
def config_from_key(key: str) -> GRPOConfig:
    """Returns the configuration of this `key`, which was checked before. In place of its tensors, which an operator
    receives by themselves, it has their defaults; what other options say of them still holds."""
    values: dict[str, Any] = {name: f.default for name, f in _OPTIONS.items()}
    for part in filter(None, key.split(";")):
        name, _, text = part.partition("=")
        values[name] = ast.literal_eval(text)
    if values["logits_dtype"] is not None:
        values["logits_dtype"] = getattr(torch, values["logits_dtype"].removeprefix("torch."))
    config = object.__new__(GRPOConfig)
    config.__dict__.update(values, key=key, derived={})
    return config


def available_presets() -> tuple[str, ...]:
    """Returns the names for `GRPOConfig.preset`."""
    return tuple(PRESETS)


_RLOO = dict(importance_sampling_level="sequence_sum", advantage_baseline="leave_one_out", advantage_scale="none")
_SFT = dict(surrogate="reinforce", aggregation="token_mean")
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": dict(aggregation="seq_mean", beta=0.04),
    # TRL's loss_type of that name: only the aggregation, without the reward scaling of arXiv:2506.02864.
    "bnpo": dict(aggregation="token_mean"),
    "dr_grpo": dict(aggregation="fixed_length", advantage_scale="none"),
    "dapo": dict(aggregation="num_items", epsilon_high=0.28),
    "gspo": dict(importance_sampling_level="sequence", aggregation="seq_mean", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": dict(surrogate="cispo", aggregation="num_items"),
    "sapo": dict(surrogate="sapo", aggregation="seq_mean"),
    "luspo": dict(importance_sampling_level="sequence", aggregation="seq_sum"),
    "vespo": dict(surrogate="vespo", aggregation="num_items"),
    "rloo": dict(aggregation="seq_mean", **_RLOO),
    "ppo": dict(aggregation="token_mean"),
    "reinforce": _SFT,
    "rft": _SFT,
    "online_rft": _SFT,
    "sft": _SFT,
    "sao": dict(surrogate="cispo_mask", aggregation="num_items", epsilon_low=0.3, epsilon_high=5.0),
    "a2po": dict(surrogate="a2po", aggregation="seq_mean"),
    "verl": dict(aggregation="num_items", dual_clip=3.0, log_ratio_clamp=20.0),
}
TRL_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")  # presets of the same names


def options_of_loss_type(loss_type: str, trl_options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that TRL and Liger read for the preset `loss_type`, with the values of `trl_options`."""
    check_one_of("loss_type", loss_type, TRL_LOSS_TYPES)
    preset = PRESETS[loss_type]
    options: dict[str, Any] = {"surrogate": preset.get("surrogate", "clip"), "aggregation": preset["aggregation"]}
    names = ["importance_sampling_level", "temperature", *SURROGATE_RULES[options["surrogate"]].options]
    if options["aggregation"] == "fixed_length":
        names.append("max_completion_length")
    if trl_options["beta"] != 0.0:
        names += ["beta", "use_bias_correction_kl"]
    return options | {name: trl_options[name] for name in names if name != "dual_clip"}  # which neither has


def check_sparse_backward(theta: object) -> float:
    """Returns theta as a number of Python; 0 for None."""
    return 0.0 if theta is None else check_option("sparse_backward", theta)


def check_option(name: str, value: object) -> Any:
    """Returns an argument of a function, which is what the configuration's option of this name is."""
    return check_value(name, value, OPTIONS[name])


_OPTIONS = {f.name: f for f in dataclasses.fields(GRPOConfig) if f.init}
OPTIONS = {name: row for name, row in arguments_of(GRPOConfig).items() if name in _OPTIONS}  # what each may be


def _unknown_option(name: str) -> str:
    """Returns the message for an option that GRPOConfig does not have; with a guess where only letters differ."""
    hint = advice(name)
    near = [] if hint else difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.85)
    hint = hint or (f"did you mean {near[0]}?" if near else "help(GRPOConfig) has them all")
    return f"GRPOConfig has no option {name!r}: {hint}"


def option_hint(name: str) -> str:
    """Returns what takes an unknown keyword of a call, as the end of a sentence; '' where nothing does."""
    hint = f"this package has config=GRPOConfig({name}=...)" if name in _OPTIONS else advice(name)
    return "" if hint is None else f"; {hint}"


DEFAULT_CONFIG = GRPOConfig()  # what a call without one gets, made once
