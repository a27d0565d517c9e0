"""TRL's GRPOTrainer with the fused loss, and the log-probability head of all of TRL's trainers.

`FusedGRPOTrainer` computes the whole loss from hidden states. `patch_trl` swaps only the head, for GRPO, RLOO, DPO,
KTO and SFT. Both leave TRL's generation, rewards and advantages as they are. README.md has the comparison with TRL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks.plain import is_quantised
from ..config import GRPOConfig, check_flag, check_sparse_backward
from ..corrections import check_rejections, normalized, rejection_mask
from ..logit_transform import logit_transform
from ..logps import fused_logps
from ..loss import GRPOLossOutput, fused_grpo_loss, grpo_loss_from_logps
from .lm_head import HeadInputs, lm_head_inputs
from .trl_support import RolloutSupport, by_rows, of_rows, truncation_of

RANGE = ((1, 16), (1, 17))  # from the first, before the second. TRL 1.15 has no head for CPUs, where the tests run

try:
    import trl
    from packaging.version import Version
except ImportError as error:
    raise ImportError("grpo_kernels.integrations.trl needs TRL: pip install 'trl>=1.16,<1.17'") from error
if not RANGE[0] <= Version(trl.__version__).release[:2] < RANGE[1]:
    raise ImportError(f"grpo_kernels.integrations.trl takes trl>=1.16,<1.17; TRL {trl.__version__} is installed")

import trl.trainer.utils as trl_utils  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.models.utils import disable_gradient_checkpointing  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, nanmax, nanmin, use_adapter  # noqa: E402

from .transformers import body_of  # noqa: E402

_IMAGE_INPUTS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_PER_TOKEN_COUNT = ("cispo", "dapo", "vespo")  # loss types that TRL divides by num_items_in_batch


_PARTS_OF_LOSS = ("get_gamma_weights", "get_off_policy_mask")  # what only TRL's own _compute_loss calls


class FusedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with its loss computed by `fused_grpo_loss`, inside of the model's forward.

    The same arguments, configuration (`trl.GRPOConfig`) and logged metrics as GRPOTrainer's; losses and gradients to
    1e-5 in float32, up to rounding under TRL's default of bfloat16 autocast. Old and reference log-probabilities come
    from `fused_logps`. With top_entropy_quantile below 1 all log-probabilities do, and the
    backward computes the logits of the kept tokens again. sparse_backward and logits_dtype, which all of these and the
    recomputed ids below have: as in `grpo_kernels.GRPOConfig`.

    On top of TRL's importance weights of vLLM, for a batch of generations of all processes: rollout_is_batch_normalize
    divides them by their mean, then rollout_rs, options of `grpo_kernels.rejection_mask`, makes weights 0, of the share
    sampling/rejected of the tokens; with rollout_rs_mask=True these tokens leave the loss and its counts of tokens, as
    in verl.
    Where top_k, top_p or min_p truncate sampling, all log-probabilities are over the ids that were kept: those that a
    pass of the policy over each rollout recomputes (`sampling_support`), or the field `sampling_mask` of a
    rollout_func, a list of ids per completion and token. Logged: sampling/kept_mass, their probability among all ids;
    sampling/support_added, the share of tokens that were sampled outside of the recomputed ids, and are added.
    truncated_support=False: TRL's loss over all ids.

    Raises:
        ValueError: at construction, by name, what this loss does not do: negative beta, entropy_coef or
            off_policy_mask_threshold, torch_compile, a model whose logits `logit_transform` has no rule for, a
            quantised lm_head; with truncated sampling what else changes logits (penalties, banned ids, least lengths);
            rollout_rs or rollout_is_batch_normalize without importance weights, rollout_rs_mask without rollout_rs;
            weights changed by these with loss_type="vespo", whose own weight is their product over a sequence.
        TypeError: a class with another trainer's loss behind this one, a part of TRL's loss that a subclass overrides
            (both would have no effect), or the configuration of a trainer with another loss.
    """

    beta: float  # TRL's, as the next two
    entropy_coef: float
    _entropy_window_stats: Tensor | None
    _support: Any = None  # the RolloutSupport of the rollout that is being scored

    def __init__(
        self, *args: Any, sparse_backward: float | None = None, truncated_support: bool = True,
        rollout_rs: Mapping[str, Any] | None = None, rollout_rs_mask: bool = False,
        rollout_is_batch_normalize: bool = False, logits_dtype: torch.dtype | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        truncated_support = check_flag("truncated_support", truncated_support)
        rollout_is_batch_normalize = check_flag("rollout_is_batch_normalize", rollout_is_batch_normalize)
        self._rollout_rs_mask = check_flag("rollout_rs_mask", rollout_rs_mask)
        if rollout_rs is not None:
            check_rejections(rollout_rs, "rollout_rs")
        elif rollout_rs_mask:
            raise ValueError("rollout_rs_mask=True has no effect without rollout_rs; leave it out")
        self._refuse_other_losses()
        super().__init__(*args, **kwargs)
        _refuse_config_of_another_loss(self)
        self._truncation = truncation_of(self) if truncated_support else None
        self._rollout_rs, self._batch_normalize = rollout_rs, rollout_is_batch_normalize
        for name, value in (("rollout_rs", rollout_rs), ("rollout_is_batch_normalize", rollout_is_batch_normalize)):
            if value and not (self.use_vllm and self.vllm_importance_sampling_correction):
                raise ValueError(f"{name}={value!r} has no effect without use_vllm and its importance weights")
        if self.loss_type == "vespo" and (rollout_is_batch_normalize or (rollout_rs and not rollout_rs_mask)):
            raise ValueError(
                "loss_type='vespo' multiplies the weights of a completion's tokens: expected no "
                "rollout_is_batch_normalize, and rollout_rs with rollout_rs_mask=True alone"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "GRPOConfig.from_trl")  # of what a loop has to do: TRL's does it
            self._loss_config = GRPOConfig.from_trl(
                self.args, self.model.config, entropy_threshold=None, entropy_coef=max(0.0, self.entropy_coef),
                sparse_backward=sparse_backward, logits_dtype=logits_dtype,
            )  # fmt: skip
        for name in ("entropy_coef", "entropy_coef_min"):  # what the configuration of the loss does not show
            if getattr(self.args, name) < 0:
                raise ValueError(f"{name}={getattr(self.args, name)}; FusedGRPOTrainer takes a number >= 0")
        if self.args.torch_compile:
            raise ValueError("torch_compile=True: FusedGRPOTrainer computes the loss inside of an eager forward")
        if self.aux_loss_enabled:
            _expert_counts(self.model.config.get_text_config())
        for model in (self.model, self.ref_model):
            if model is not None:
                base = self.accelerator.unwrap_model(model)  # the reference model is prepared already
                base = base.get_base_model() if hasattr(base, "peft_config") else base
                options = {"temperature": self.temperature, "logits_dtype": logits_dtype}
                _add_head(base, options, lambda: self._support, in_float32=self.args.cast_lm_head_to_fp32)

    @classmethod
    def _refuse_other_losses(cls) -> None:
        """Raises where a class that stands behind this one, or a part of TRL's loss that this one does not call, is
        another than GRPOTrainer's: it would have no effect."""
        parts = {name: getattr(cls, name) for name in _PARTS_OF_LOSS}
        for name, method in {"_compute_loss": super()._compute_loss, **parts}.items():
            if method is not getattr(GRPOTrainer, name):
                raise TypeError(
                    f"{cls.__name__} has {method.__qualname__}, which FusedGRPOTrainer does not call: its loss is that "
                    "of GRPOTrainer; use patch_trl() with a trainer that has another loss"
                )

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        completions, masks = generated[1], generated[5].pop("sampling_mask", None)
        if self._truncation is not None:
            self._support = RolloutSupport(self, completions, masks)
        elif masks is not None:
            raise ValueError("rollout_func returned sampling_mask, and nothing truncates, or truncated_support=False")
        return generated

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any]
        if self._truncation is None:
            batch = super()._generate_and_score_completions(inputs)
        else:
            batch = self._score_under_support(inputs)
        self._correct(batch)
        return batch

    def _score_under_support(self, inputs: list[Any]) -> dict[str, Any]:
        """Samples and scores under the ids that were kept."""
        beta, self.beta, args = self.beta, 0.0, self.args  # TRL scores no reference model: the policy comes first
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            size = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
            score = functools.partial(self._run, inputs=output, batch_size=size)
            with torch.no_grad(), disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
                if "old_per_token_logps" not in output:
                    score(self.model)
                if beta != 0.0 and self.ref_model is not None:
                    output["ref_per_token_logps"], *_ = score(self.ref_model)
                elif beta != 0.0:  # the policy without its adapter, or with the one that TRL made of it at the start
                    peft = self.accelerator.unwrap_model(self.model)
                    with use_adapter(peft, adapter_name="ref" if "ref" in peft.peft_config else None):
                        output["ref_per_token_logps"], *_ = score(self.model)
            kept = self._support.of_completions()
        finally:
            self.beta, self._support = beta, None
        mask = _completion_mask(output)
        measured = {"sampling/kept_mass": kept.mass, "sampling/support_added": kept.added}
        self._log_sums({n: (torch.where(mask, x, 0.0).sum(), mask.sum()) for n, x in measured.items() if x is not None})
        return output | by_rows(kept)

    def _run(self, forward: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> Any:
        """Scores the completions of a batch. TRL prepares what the model takes, images among it."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        options |= {name: inputs.get(name) for name in _IMAGE_INPUTS}
        return self._get_per_token_logps_and_entropies(
            forward, ids, attention_mask, inputs["completion_ids"].size(1), **options
        )

    def _correct(self, batch: dict[str, Any]) -> None:
        """Normalizes and rejects TRL's importance weights of the sampling engine."""
        mask, name = _completion_mask(batch), "importance_sampling_ratio"
        if self._batch_normalize:
            counted = mask if batch[name].size(1) > 1 else mask.any(1, keepdim=True)
            batch[name] = normalized(batch[name], counted)
        if self._rollout_rs is not None:
            old, sampled = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
            kept = rejection_mask(old, sampled, self._rollout_rs, completion_mask=mask)
            if self._rollout_rs_mask:  # by the mask of TRL that hides no token from the model
                batch["tool_mask"] = kept.to(batch["completion_mask"].dtype)
                batch["num_items_in_batch"] = self.accelerator.gather(kept.sum()).sum()
            else:
                batch[name] = batch[name] * kept
            self._log_sums({"sampling/rejected": ((mask & ~kept).sum(), mask.sum())})

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        call, outputs = _LossCall(self, inputs), []

        def forward(**kwargs: Any) -> Any:
            outputs.append(model(**kwargs, grpo_loss=call))
            return outputs[0]

        *_, aux_loss = self._run(forward, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled)
        loss = outputs[0].loss  # what DDP returned, which is not what the call returned to it
        if self._entropy_bonus_enabled:
            self._follow_entropy(call)
        if aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss / call.accumulation
            self._log_mean("aux_loss", aux_loss)
        self._log_metrics(call)
        return loss

    def _follow_entropy(self, call: _LossCall) -> None:
        """Logs the entropy bonus, and lets the controller set its coefficient for the next step."""
        self._log_mean("policy_loss", call.policy_loss)
        if not self.model.training:
            return
        if self.use_adaptive_entropy:
            so_far, args = self._entropy_window_stats, self.args
            self._entropy_window_stats = call.bonus_sums if so_far is None else so_far + call.bonus_sums
            if self.accelerator.sync_gradients:
                total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum").tolist()
                self._last_world_entropy = total / max(count, 1.0)
                is_low = self._last_world_entropy <= args.entropy_target
                moved = self.entropy_coef + (args.entropy_coef_delta if is_low else -args.entropy_coef_delta)
                self.entropy_coef = (
                    max(args.entropy_coef_min, moved) if not is_low else min(args.entropy_coef_max, moved)
                )
                self._entropy_window_stats = None
        if self.accelerator.sync_gradients:
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)

    def _log_mean(self, name: str, value: Tensor) -> None:
        mean = self.accelerator.gather(value.detach()).nanmean().item()
        self._metrics["train" if self.model.training else "eval"][name].append(mean)

    def _log_sums(self, sums: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Logs quotients (sum, count) of all ranks together."""
        log = self._metrics["train" if self.model.training else "eval"]
        reduced = self.accelerator.reduce(torch.stack([torch.stack(pair) for pair in sums.values()]), reduction="sum")
        for name, (total, count) in zip(sums, reduced.tolist(), strict=True):
            log[name].append(total / max(count, 1.0))

    def _log_metrics(self, call: _LossCall) -> None:
        """Logs TRL's metrics under TRL's names: sums over sums of all ranks, extrema of the sequences' means."""
        log = self._metrics["train" if self.model.training else "eval"]
        sums = {name: call.token_sum(name) for name in ("kl", "entropy") if name != "kl" or self.beta != 0.0}
        extrema = {}
        if self.loss_type in _CLIPPED:
            low, high = (call.sequence_means(f"clip_ratio/{side}") for side in ("low", "high"))
            for side in ("low", "high", "region"):
                sums[f"clip_ratio/{side}_mean"] = call.ratio_sum(f"clip_ratio/{side}")
            extrema = {"clip_ratio/low_min": (nanmin, low), "clip_ratio/high_max": (nanmax, high)}
        elif self.loss_type == "cispo":
            sums["cispo_clip_ratio"] = call.ratio_sum("cispo_clip_ratio")
        elif self.loss_type == "vespo":
            sums["vespo/phi_seq_mean"] = call.phi_sum()
        self._log_sums(sums)
        for name, (function, means) in extrema.items():
            log[name].append(function(self.accelerator.gather(means)).item())


class _LossCall:
    """The loss of one micro-batch: called in the model's forward with hidden states; then what the metrics need."""

    def __init__(self, trainer: FusedGRPOTrainer, inputs: dict[str, Any]) -> None:
        self.trainer, self.inputs = trainer, inputs
        self.mask = _completion_mask(inputs)
        advantages = inputs["advantages"]
        self.advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        self.accumulation = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
        self.out: GRPOLossOutput
        self.policy_loss: Tensor  # as TRL logs it: before the division by accumulation
        self.bonus_sums: Tensor  # (2,): entropies of the tokens with a bonus, and their number

    def __call__(self, head: HeadInputs) -> FusedCausalLMOutput:
        """Computes the loss from hidden states (B, P + T, H), of which T score completions."""
        trainer, ids = self.trainer, self.inputs["completion_ids"]
        head = head._replace(hidden=head.hidden[:, -ids.size(1) - 1 : -1])
        with torch.no_grad():
            normalizer = self._normalizer()
        # Constant over an accumulation window; an adaptive one is 0 above its target and before the first entropy.
        is_above = trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target
        coefficient = 0.0 if is_above else float(trainer.entropy_coef)
        quantile = trainer.top_entropy_quantile
        config = dataclasses.replace(trainer._loss_config, entropy_coef=coefficient if quantile >= 1.0 else 0.0)
        options: dict[str, Any] = dict(
            completion_mask=self.mask, old_logps=self.inputs.get("old_per_token_logps"), normalizer=normalizer,
            rollout_weights=self._rollout_weights(),
        )  # fmt: skip
        if trainer.beta != 0.0:
            options["ref_logps"] = self.inputs["ref_per_token_logps"]
        if trainer.off_policy_mask_threshold is not None:
            options["rollout_logps"] = self.inputs.get("sampling_per_token_logps")
            if options["rollout_logps"] is None and options["old_logps"] is None:  # nothing that could differ
                config = dataclasses.replace(config, off_policy_mask_threshold=None)
        if quantile < 1.0:
            loss = self._loss_of_quantile(head, coefficient, config, options)
        else:
            count = self.mask.sum().clamp(min=1)
            if coefficient != 0.0:
                options["entropy_normalizer"] = count * self.accumulation
            self.out = fused_grpo_loss(
                head.hidden, head.weight, ids, self.advantages, lm_head_bias=head.bias, config=config,
                sampling_mask=of_rows(self.inputs), **options,
            )  # fmt: skip
            loss = self.out.loss
            total, _ = self.out.metric_sums["entropy"]
            self._account(loss, coefficient, total, self.mask.sum())
        return FusedCausalLMOutput(loss=loss, log_probs=self.out.logps, entropy=self.out.entropy)

    def _loss_of_quantile(
        self, head: HeadInputs, coefficient: float, config: GRPOConfig, options: dict[str, Any]
    ) -> Tensor:
        """Returns the loss from log-probabilities, since the threshold follows from all entropies: the backward
        computes logits of kept tokens again."""
        trainer = self.trainer
        logps, entropy = fused_logps(
            head.hidden, head.weight, self.inputs["completion_ids"], completion_mask=self.mask, lm_head_bias=head.bias,
            sampling_mask=of_rows(self.inputs), entropy=True, temperature=config.temperature,
            logit_scale=config.logit_scale, logit_softcap=config.logit_softcap, sparse_backward=config.sparse_backward,
            logits_dtype=config.logits_dtype,
        )  # fmt: skip
        assert entropy is not None
        known = entropy.detach()
        kept = trainer.get_high_entropy_mask(known, self.mask, 1 - trainer.top_entropy_quantile)
        threshold = known.masked_fill(~kept, torch.inf).amin()  # of this rank: its other tokens are below
        config = dataclasses.replace(config, entropy_threshold=threshold)
        self.out = grpo_loss_from_logps(logps, self.advantages, entropy=known, config=config, **options)
        total, count = (entropy * kept).sum(), kept.sum()
        loss = self.out.loss
        if coefficient != 0.0:
            loss = loss - coefficient * total / count.clamp(min=1) / self.accumulation
        self._account(loss, coefficient, total.detach(), count)
        return loss

    def _account(self, loss: Tensor, coefficient: float, entropy: Tensor, count: Tensor) -> None:
        per_step = 1 if self.trainer.loss_type in _PER_TOKEN_COUNT else self.accumulation
        bonus = coefficient * entropy / count.clamp(min=1) / self.accumulation
        self.policy_loss = (loss.detach() + bonus) * per_step
        self.bonus_sums = torch.stack([entropy, count.to(entropy.dtype)])

    def _normalizer(self) -> Tensor | float:
        trainer, aggregation = self.trainer, self.trainer._loss_config.aggregation
        if trainer.loss_type in _PER_TOKEN_COUNT:
            # num_items_in_batch counts a batch of generations on all ranks; gradients are averaged over ranks.
            items = self.inputs["num_items_in_batch"].clamp(min=1) / trainer.accelerator.num_processes
            return items * self.accumulation / trainer.args.steps_per_generation if trainer.model.training else items
        if aggregation == "token_mean":
            return self.mask.sum().clamp(min=1) * self.accumulation
        sequences = self.mask.size(0) * self.accumulation
        return sequences * trainer.max_completion_length if aggregation == "fixed_length" else sequences

    def _rollout_weights(self) -> Tensor | None:
        trainer = self.trainer
        if trainer.loss_type == "vespo":
            return self.inputs.get("importance_sampling_ratio")
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            return self.inputs["importance_sampling_ratio"]
        return None

    def _is_per_sequence(self) -> bool:
        """Says whether TRL has the ratio's metrics as one value per sequence: all rows count then, empty ones too."""
        of_sequence = self.trainer.importance_sampling_level == "sequence" or self.mask.size(1) == 1
        return of_sequence and self.advantages.size(1) == 1

    def token_sum(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns (sum, count) over tokens."""
        total, count = self.out.metric_sums[name]
        return total, torch.full_like(count, len(self.mask)) if self.mask.size(1) == 1 else count

    def ratio_sum(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns (sum, count) of a metric of the ratio, over sequences or tokens."""
        if not self._is_per_sequence():
            return self.out.metric_sums[name]
        per_sequence = self.out.sequences[name]
        if name == "cispo_clip_ratio":  # a sequence without tokens has ratio 1, which a cap below 1 clips
            clipped = (self.advantages.view(-1) > 0) & (self.trainer.epsilon_high < 1)
            per_sequence = torch.where(self.out.sequences["tokens"] > 0, per_sequence, clipped.to(per_sequence.dtype))
        return per_sequence.sum(), per_sequence.new_full((), len(per_sequence))

    def sequence_means(self, name: str) -> Tensor:
        """Returns means (B,), NaN for a sequence without tokens where the ratio is the token's."""
        means, tokens = self.out.sequences[name], self.out.sequences["tokens"]
        return means if self._is_per_sequence() else means.masked_fill(tokens == 0, torch.nan)

    def phi_sum(self) -> tuple[Tensor, Tensor]:
        """Returns (sum, count) of VESPO's weights of sequences."""
        args, old = self.trainer.args, self.inputs.get("old_per_token_logps")
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        phi = self.trainer.get_gamma_weights(
            advantages=self.advantages,
            log_ratio_per_token=torch.zeros_like(self.out.logps) if old is None else self.out.logps - old,
            mask=self.mask,
            importance_sampling_ratio=self._rollout_weights(),
            **{name: getattr(args, f"vespo_{name}") for name in names},
        )
        if phi.size(1) == 1:
            return phi.sum(), phi.new_full((), len(phi))
        return (phi * self.mask).sum(), self.mask.sum().to(phi.dtype)


def _refuse_config_of_another_loss(trainer: FusedGRPOTrainer) -> None:
    """Raises for the configuration of a variant of TRL, and for fields that nothing here reads."""
    kind = type(trainer.args)
    variants = [x for x in kind.__mro__ if issubclass(x, trl.GRPOConfig) and x is not trl.GRPOConfig]
    trl_variants = [x.__name__ for x in variants if x.__module__.partition(".")[0] == "trl"]
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    unknown = [field.name for field in dataclasses.fields(kind) if field.name not in known]
    if trl_variants:
        why = f"a {trl_variants[0]}, of a loss that is not GRPOTrainer's"
    elif unknown and type(trainer) is FusedGRPOTrainer:
        why = f"a {kind.__name__} with {', '.join(unknown)}, which FusedGRPOTrainer does not read"
    else:
        return
    raise TypeError(f"args is {why}; expected a trl.GRPOConfig. A trainer with a loss of its own goes with patch_trl()")


def _completion_mask(inputs: dict[str, Any]) -> Tensor:
    """Returns (B, T) bool: what the model sampled."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def _add_head(
    model: Any, options: Mapping[str, Any], support: Callable[[], RolloutSupport | None], *, in_float32: bool
) -> None:
    """Makes `model(..., fused_lm_head=True)` return what TRL's head returns, and with grpo_loss= the loss too.
    options: of `fused_logps`. support: of the rollout that is being scored, if its sampling was truncated.

    It stands on top of TRL's own head, of which it keeps the arguments; other calls (generation) go through unchanged.
    """
    original, text_config = model.forward, model.config.get_text_config()
    transform = logit_transform(model.config)
    options = dict(options, logit_scale=transform.scale, logit_softcap=transform.softcap)
    _check_head(model.get_output_embeddings())
    body_of(model)  # raises where there is none

    @functools.wraps(type(model).forward)  # generate() looks at the signature
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None,
        grpo_loss: Callable[[HeadInputs], FusedCausalLMOutput] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if not fused_lm_head:
            return original(*args, **kwargs) if labels is None else original(*args, labels=labels, **kwargs)
        kwargs["use_cache"] = False
        backbone = body_of(self)(*args, **kwargs)
        hidden = backbone.last_hidden_state
        autocast: Any = contextlib.nullcontext()
        lm_head = self.get_output_embeddings()
        hidden = hidden.to(next(lm_head.parameters()).device)
        if in_float32:
            hidden, autocast = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
        with autocast:
            by_peft = hasattr(lm_head, "original_module")  # modules_to_save or trainable tokens
            head = lm_head_inputs(lm_head, hidden) if by_peft else HeadInputs(hidden, lm_head.weight, lm_head.bias)
            out = _score(head, labels, options, support()) if grpo_loss is None else grpo_loss(head)
        if kwargs.get("output_router_logits"):
            out.aux_loss = _load_balancing(backbone.router_logits, text_config, kwargs.get("attention_mask"))
        return out

    model.forward = types.MethodType(forward, model)


def _score(
    head: HeadInputs, labels: Any, options: dict[str, Any], support: RolloutSupport | None
) -> FusedCausalLMOutput:
    """Returns log-probabilities and entropies of the labels, which are shifted here; -100 is left out."""
    head = head._replace(hidden=head.hidden[:, :-1])
    labels = labels[:, 1:].to(head.hidden.device)
    mask = labels != -100
    sampling_mask = None if support is None else support(head, labels, mask, options)
    logps, entropy = fused_logps(
        head.hidden, head.weight, labels, completion_mask=mask, sampling_mask=sampling_mask, lm_head_bias=head.bias,
        entropy=True, **options,
    )  # fmt: skip
    return FusedCausalLMOutput(log_probs=logps, entropy=entropy, label_mask=mask)


def _check_head(lm_head: Any) -> None:
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"lm_head is a {type(lm_head).__name__} without weight; expected a linear layer")
    if is_quantised(weight) or hasattr(weight, "quant_state"):
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise ValueError(f"lm_head is quantised ({kind}): leave it out (llm_int8_skip_modules=['lm_head'])")


def _expert_counts(text_config: Any) -> tuple[int, int]:
    """Returns (experts, experts per token) of a mixture of experts."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(text_config, name, None)
        if isinstance(count, int) and hasattr(text_config, "num_experts_per_tok"):
            return count, text_config.num_experts_per_tok
    raise ValueError(f"router_aux_loss_coef: model_type {text_config.model_type!r} has experts of unknown number")


def _load_balancing(router_logits: Any, text_config: Any, attention_mask: Tensor | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss: Any = load_balancing_loss_func(router_logits, *_expert_counts(text_config), attention_mask)
    return loss


class _FusedLogProbs:
    """What stands in the place of TRL's autograd.Function: the same `apply`."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        softcap: float | None = None, logit_scale: float = 1.0, outputs: tuple[str, ...] = ("log_probs",),
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Returns, of hidden (N, H) and targets (N,), (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1),
        each (N,), None for what is not in `outputs`. chunk_size is TRL's; rows per chunk follow from memory here."""
        options: dict[str, Any] = dict(temperature=temperature, logit_scale=logit_scale, logit_softcap=softcap)
        logps, entropy = fused_logps(
            hidden, weight, targets, lm_head_bias=bias, entropy="entropy" in outputs, **_head_options, **options,
        )  # fmt: skip
        return logps, entropy, *_statistics(HeadInputs(hidden, weight, bias), targets, outputs, options)


# Of logits (n, V) and targets (n,): what the metrics of DPO, KTO and SFT need beside log-probabilities, (n,) each.
_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_sum_sq_probs": lambda z, target: (2 * z).logsumexp(-1) - 2 * z.logsumexp(-1),
    "mean_logits": lambda z, target: z.mean(-1),
    "is_top1": lambda z, target: z.argmax(-1) == target,
}
_STATISTICS_ROWS = 256  # whose logits are in memory at a time


@torch.no_grad()
def _statistics(
    head: HeadInputs, targets: Tensor, outputs: tuple[str, ...], options: dict[str, Any]
) -> list[Tensor | None]:
    """Returns what of _STATISTICS is in `outputs`, at the price of another product."""
    statistics: dict[str, list[Tensor]] = {name: [] for name in _STATISTICS if name in outputs}
    softcap = options["logit_softcap"]
    parts = zip(head.hidden.split(_STATISTICS_ROWS), targets.split(_STATISTICS_ROWS), strict=True)
    for h, target in parts if statistics else ():
        z = torch.nn.functional.linear(h, head.weight, head.bias).float() * options["logit_scale"]
        z = (z if softcap is None else torch.tanh(z / softcap) * softcap) / options["temperature"]
        for name, values in statistics.items():
            values.append(_STATISTICS[name](z, target))
    return [torch.cat(statistics[name]) if name in statistics else None for name in _STATISTICS]


# Private names of trl.trainer.utils, held by the tests for each release: the head's autograd.Function, and whether it
# gets only the scored positions.
_PATCHES: dict[str, Any] = {"_ChunkedLogProbFunction": _FusedLogProbs, "_use_triton": lambda device: True}
_originals: dict[tuple[types.ModuleType, str], Any] = {}
_head_options: dict[str, Any] = {}  # of patch_trl


def patch_trl(sparse_backward: float | None = None, logits_dtype: torch.dtype | None = None) -> None:
    """Lets all of TRL's trainers (GRPO, RLOO, DPO, KTO, SFT) compute log-probabilities and entropies by `fused_logps`,
    and DistillationTrainer its loss by `fused_distillation_loss`.

    The other losses stay TRL's. On a CPU prompts are no longer scored. The metrics of DPO, KTO and SFT that need more
    than log-probability and entropy (mean_logits, is_top1) cost a product without gradient. sparse_backward, of
    log-probabilities, and logits_dtype: as in `grpo_kernels.GRPOConfig`. A second call changes nothing else.
    """
    check_sparse_backward(sparse_backward)
    import trl.trainer.distillation_trainer as trl_distillation

    from .trl_distillation import LOSS, divergence_loss

    patches = {(trl_utils, name): replacement for name, replacement in _PATCHES.items()}
    patches[trl_distillation, LOSS] = divergence_loss
    for module, name in patches:
        if not hasattr(module, name):
            raise RuntimeError(f"TRL {trl.__version__} has no {module.__name__}.{name}, which cannot be replaced")
    if not _originals:
        _originals.update({(module, name): getattr(module, name) for module, name in patches})
    for (module, name), replacement in patches.items():
        setattr(module, name, replacement)
    _head_options.update(sparse_backward=sparse_backward, logits_dtype=logits_dtype)


def unpatch_trl() -> None:
    """Puts TRL's own head back."""
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()
