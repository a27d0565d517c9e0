"""fused_grpo_loss, and the same loss from log-probabilities or logits that the caller already has; what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from .checks.arguments import (
    Sizes,
    check_accumulate_into,
    check_by_table,
    check_ids,
    check_lm_head,
    check_logits_dtype,
    check_values,
    refuse_transforms,
)
from .checks.tokens import check_token_tensor
from .config import check_flag
from .head.loss_op import LossCall, loss_from_hidden, loss_from_logits, loss_from_logps
from .head.shared import requires_grad_flags, statistics_dtype
from .inputs import LossOptions, agreed, check_loss_inputs, forwards_loss_options, read_config
from .objective.metrics import Batch, Measured
from .sampling_mask import SamplingMask
from .teacher import Teacher, TopKTeacher, check_teacher, combined_teachers, refuse_with_teacher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False, repr=False)  # a dataclass, because DDP and FSDP search its fields for the loss
class GRPOLossOutput:
    """What a loss call returns; everything but `loss` is detached.

    loss: scalar, differentiable.
    logps, entropy: shape of completion_ids, float32 (float64 from float64), nats; 0 where masked or not scored.
    divergence: likewise, to the teacher's distribution; None without a teacher.
    advantages: as used, in the shape that they were given in, (S,) from rewards; copied whenever they are asked for.

    None of these shares the memory of an input.

    These are tensors, computed at first access:

    metrics: name -> scalar; with an entropy bonus there is policy_loss, the loss without it.
    metric_sums: name -> (sum, count), to be added over ranks and micro-batches. Like `metrics` it reads old_logps,
        rollout_logps and rollout_weights of the call when it is first asked for.
    sequences: name -> (S,): loss (the sequence's share: the shares add up to `loss`), tokens, and the mean of each
        metric over the sequence's tokens (0 for a sequence without tokens).
    groups: name -> (num_groups,), when groups are given: loss (the group's share), kl, clip_ratio, tokens, and from
        rewards reward_mean and reward_std. Groups of group_ids are in ascending order of their id.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    _batch: Batch
    _found: Tensor  # what metrics are computed from
    _others: Tensor
    divergence: Tensor | None = None
    _computed: dict[str, Any] = field(init=False, default_factory=dict)  # functools.cached_property has a lock

    def __repr__(self) -> str:
        return f"GRPOLossOutput(loss={self.loss}, logps of {tuple(self.logps.shape)})"

    @property
    def advantages(self) -> Tensor:
        advantages = self._batch.advantages
        assert advantages is not None
        return advantages.detach().clone() if self._batch.reward_statistics is None else advantages.flatten().clone()

    @property
    def metrics(self) -> dict[str, Tensor]:
        return self._once("metrics", lambda measured: measured.metrics(self.loss))

    @property
    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self._once("metric_sums", Measured.metric_sums)

    @property
    def sequences(self) -> dict[str, Tensor]:
        return self._once("sequences", Measured.of_sequences)

    @property
    def groups(self) -> dict[str, Tensor]:
        return self._once("groups", Measured.of_groups)

    def _once(self, name: str, compute: Callable[[Measured], Any]) -> Any:
        if name not in self._computed:
            with torch.no_grad(), torch.inference_mode(False):  # the results outlive the mode of the first caller
                if "measured" not in self._computed:
                    self._computed["measured"] = Measured(self._batch, self._found, self._others)
                self._computed[name] = compute(self._computed["measured"])
        return self._computed[name]


@forwards_loss_options
def fused_grpo_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor | None = None,
    *,
    sampling_mask: SamplingMask | None = None,
    lm_head_bias: Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    accumulate_into: Tensor | None = None,
    teacher: Teacher | TopKTeacher | Sequence[Teacher] | None = None,
    teacher_of: Tensor | None = None,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """Computes the GRPO family's loss from hidden states, forward and backward, without (N, V) logits.

    Shapes: N = B T tokens, S sequences (B, or the packed ones), H hidden size, V vocabulary.

    Args:
        hidden: (B, T, H), or packed (N, H) with cu_seqlens; row t predicts completion_ids[:, t]. float32, bfloat16,
            float16 or float64; any strides.
        lm_head_weight: (V, H), in hidden's type; or in float32 with 16-bit hidden states, which are then converted:
            products in float32, each gradient in its input's type. Under torch.autocast products are in its type.
            Gradients are computed for the inputs that require them. For a layer of PEFT see
            `grpo_kernels.integrations.lm_head`: its `weight` is the base weight without the adapter. A sharded weight
            or bias (DTensor) is gathered for the call, and its gradient averaged over the ranks, as FSDP2 does for the
            other parameters. Other DTensors and quantised weights are refused, with what to pass instead.
        lm_head_bias: (V,), with the same choice of types.
        completion_ids: (B, T) or (N,) int64.
        completion_mask: the shape of completion_ids, bool or numbers: 0 at padding, prompt and tool tokens,
            1 elsewhere.
        advantages: (B,), (B, 1), (B, T) or (N,); packed sequences also (S,) or (S, 1). Or instead of them:
        rewards: (S,), with num_generations or group_ids: the advantages of `group_advantages` under
            config.advantage_*, in the same call. NaN is refused: where completions have no verdict, pass the result of
            `group_advantages`.
        num_generations: the number of adjacent rows that are a group. With advantages, groups serve `groups` only.
        group_ids: (S,), the group of each sequence, instead of num_generations.
        old_logps: log-probabilities under the policy that the ratio divides by; None: on-policy, ratio 1.
        ref_logps: under the reference policy; required where config.beta > 0.
        rollout_weights: importance weights of the sampling engine, per token or per sequence (see `rollout_weights`).
        rollout_logps: under the sampling engine, NaN where unknown: the ratio of "dppo_tv" and "ipo", the off-policy
            mask, mismatch metrics.
        token_weights: factors >= 0 of each token's whole loss, KL and divergence included, per token or per sequence;
            the denominator of the aggregation stays as it is.
        cu_seqlens: (S + 1,) offsets of packed sequences.
        sampling_mask: the ids that truncated sampling (top-p, top-k, min-p) kept for each token: log-probabilities,
            entropy and gradients belong to the distribution over them (DeepSeek-V3.2, arXiv:2512.02556, section
            3.1). old_logps, ref_logps and rollout_logps must be under the same mask. Where a token keeps few ids, its
            time and memory follow the kept ids, not the vocabulary.
        vocab_parallel_group: weight and bias are this rank's slice of the vocabulary, contiguous rows in the order of
            the group's ranks, of any sizes; all else is the same on every rank of it, and the ids of completion_ids and
            sampling_mask are ids of the whole vocabulary. Loss, metrics and hidden's gradient are then the same on
            all of them, the weight's gradient the slice's own. For each chunk of rows 24 bytes per token and rank
            are gathered, with a sampling mask up to 8 more, with a teacher on K ids up to 40 K; hidden's gradient is
            all-reduced once. Not under torch.compile or a CUDA graph.
        num_items_in_batch: denominator of aggregation "num_items", at least 1, or 0 where no rank has a token; None:
            the tokens of this call.
        normalizer: replaces the denominator of any aggregation: the global number of sequences ("seq_mean", "seq_sum"),
            of tokens ("token_mean", "num_items"), of sequences times max_completion_length ("fixed_length").
            Micro-batches and ranks that pass it add up to the loss of one big batch; nothing is all-reduced here.
        entropy_normalizer: denominator of the entropy bonus, entropy_coef times the sum of the tokens' entropies over
            it: the global number of tokens, say. None: the denominator of "token_mean" and "num_items"; with another
            aggregation the mean over this call's tokens, and an error where its `normalizer` is given, which does not
            say how many tokens there are.
        accumulate_into: (V, H) float32, contiguous, such as Megatron's main_grad of the weight: each backward adds the
            weight's gradient to it, times grad_output, and returns none, so that weight.grad and hooks of the weight
            are left alone. The weight is a leaf that requires a gradient, and no float64; not under torch.compile.
            From forward to backward the gradient waits in a (V, H) of its own in the weight's type (float32 for
            float16), as it does without this; what is saved is weight.grad beside the buffer.
        teacher: a `Teacher`, whose distribution over the whole vocabulary the loss of a token has a divergence to,
            config.distill_coef times (config.divergence). Like the KL, it is no part of the surrogate. With the
            reference model as the teacher and "reverse_kl" this is GRPO with the exact KL, where k1, k2 and k3 estimate
            it from the sampled id; leave beta at 0 then. It costs the teacher's product, N H' V, and a second chunk of
            logits; with `top_k` see there. Or a `TopKTeacher`. With vocab_parallel_group a Teacher has this rank's rows
            of its weight. Not with config.sparse_backward; with a sampling_mask where it is a TopKTeacher's own.
            A list of Teachers, with `teacher_of`: each has tokens of its own, and costs the products of these alone.
        teacher_of: (S,) or the shape of completion_ids, integers: the index of the teacher that a sequence or a token
            has in the list; -1: none, a divergence of 0. teacher[i].hidden is `hidden_of_all[teacher_of == i]`, the
            rows of its own tokens in the order of the batch. Widths, biases, scales and softcaps of teachers may
            differ, types, top_k and mode not. Its numbers are read on the host, so not under a CUDA graph.
        config: GRPOConfig; None: GRPOConfig().
        backend: "auto", or a name of `available_backends()`.

    Returns:
        GRPOLossOutput: loss (), to call backward on; logps and entropy of the tokens, (B, T) or (N,) float32 nats, 0 at
        padding, without a graph; divergence likewise, None without a teacher; advantages; metrics, metric_sums,
        sequences and groups by name.

    Example:
        >>> hidden, weight = torch.randn(4, 6, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> ids, rewards = torch.randint(100, (4, 6)), torch.tensor([0.0, 1.0, 1.0, 0.0])
        >>> config = GRPOConfig.preset("dapo")
        >>> out = fused_grpo_loss(hidden, weight, ids, rewards=rewards, num_generations=2, config=config)
        >>> out.loss.backward()
        >>> weight.grad.shape
        torch.Size([100, 32])

    Raises:
        ValueError, TypeError: an argument that does not fit, by name, before any work. Values are looked at on a CPU,
        and on a GPU with GRPO_KERNELS_DEBUG=1: ids outside [0, V), a completion_mask of other numbers than 0 and 1,
        num_items_in_batch between 0 and 1, or 0 where tokens count, and at unmasked positions NaN in old_logps or
        ref_logps, log-probabilities above 0 (by more than 1 nat: logits of 16 bits round), advantages and weights that
        are not finite in float32 and weights below 0; NaN or infinite rewards, temperatures and normalizers that are
        not positive and finite, offsets out of order. Without that switch a GPU's loss is NaN for
        such numbers and ids (with backend "torch" such an id is a device-side assertion; a NaN reward counts as no
        verdict; a negative normalizer turns the sign), and memory beside the batch is read for such offsets.
        With vocab_parallel_group every rank raises if ranks differ in shapes, types or options, or one has refused
        those. Values are not compared: where they differ, ranks may wait for each other until the group's timeout.
        Everything but hidden, weight and bias is a constant: where it requires a gradient, which it would not get, this
            raises too, except under no_grad.
        RuntimeError: a torch.func transform or forward-mode AD; `grpo_kernels.reference` is for those.
    """

    # An option that does not exist is an error before weights are gathered. Ranks of a group fail together, in `check`.
    early = None if vocab_parallel_group is not None else read_config("fused_grpo_loss", options)

    def check(weight: Tensor, bias: Tensor | None) -> LossCall:
        config = early or read_config("fused_grpo_loss", options)
        compute_dtype, sizes = check_lm_head("fused_grpo_loss", hidden, weight, bias)
        check_ids(completion_ids, sizes, "hidden", hidden)
        dtype = compute_dtype or hidden.dtype
        check_logits_dtype(config.logits_dtype, dtype)
        if accumulate_into is not None:
            check_accumulate_into(accumulate_into, weight)
        teachers = combined_teachers(teacher, teacher_of, hidden, options.get("cu_seqlens"))
        check_teacher(teachers, config, hidden, weight, dtype)
        if teachers is not None:
            refuse_with_teacher(teachers, sampling_mask, config)
        batch = check_loss_inputs(
            advantages, sampling_mask, options, config, completion_ids, "hidden", dtype, teacher=teachers
        )
        wants = requires_grad_flags(hidden, weight, bias)
        return LossCall(completion_ids, batch, compute_dtype, wants, accumulate_into, teacher=teachers)

    weight, bias, call = agreed(vocab_parallel_group, (hidden, lm_head_weight, lm_head_bias), check)
    loss, logps, entropy, measured, others, *divergence = loss_from_hidden(hidden, weight, bias, call)
    return GRPOLossOutput(loss, logps, entropy, call.batch, measured, others, *divergence)


@forwards_loss_options
def grpo_loss_from_logps(
    logps: Tensor,
    advantages: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """Computes the loss of `fused_grpo_loss` from log-probabilities (B, T) or packed (N,), nats.

    It is differentiable in logps and entropy. entropy: of the same shape; needed for an entropy bonus or threshold. NaN
    in either at an unmasked position makes the loss NaN. Options of the logits (temperature, ...) and of the engine are
    not read. Everything else is as in `fused_grpo_loss`.
    """
    config = read_config("grpo_loss_from_logps", options)
    refuse_transforms("grpo_loss_from_logps", logps, entropy)
    check_by_table("logps", logps, {})
    if entropy is not None:
        check_token_tensor("entropy", entropy, logps.shape, -1, logps)
    elif config.has_entropy_bonus or config.entropy_threshold is not None:
        raise ValueError("entropy is None; entropy_coef and entropy_threshold need it")
    batch = check_loss_inputs(advantages, None, options, config, logps, "logps", logps.dtype, reads_logits=False)
    entropy_input = torch.zeros_like(logps) if entropy is None else entropy
    loss, measured, *_ = loss_from_logps(
        logps, entropy_input, list(batch.tokens), batch.num_groups, batch.per_sequence, config.key, batch.backend
    )
    mask = options.get("completion_mask")
    known = None if entropy is None else _without_padding(entropy, mask)
    return GRPOLossOutput(loss, _without_padding(logps, mask), known, batch, measured, measured.new_zeros(0))


def _without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns a copy in float32 or better, 0 where masked."""
    x = x.detach().to(statistics_dtype(x.dtype), copy=mask is None)
    return x if mask is None else torch.where(mask.bool(), x, 0.0)


@forwards_loss_options
def grpo_loss_from_logits(
    logits: Tensor,
    completion_ids: Tensor,
    advantages: Tensor | None = None,
    *,
    sampling_mask: SamplingMask | None = None,
    inplace: bool = False,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """Computes the loss of `fused_grpo_loss` from raw logits (B, T, V) or (N, V) of the caller, with any row stride.

    It allocates one buffer of gradients; with inplace=True none: the gradient overwrites the logits, which must not be
    used again (autograd notices if something else saved them). Everything else is as in `fused_grpo_loss`.
    """
    config = read_config("grpo_loss_from_logits", options)
    refuse_transforms("grpo_loss_from_logits", logits)
    if config.sparse_backward is not None:
        raise ValueError("config.sparse_backward has no effect in grpo_loss_from_logits, whose gradient is a matrix")
    inplace = check_flag("inplace", inplace)
    sizes: Sizes = {}
    check_by_table("logits", logits, sizes)
    check_ids(completion_ids, sizes, "logits", logits)
    batch = check_loss_inputs(advantages, sampling_mask, options, config, completion_ids, "logits", logits.dtype)
    check_values(completion_ids, options.get("completion_mask"), logits.shape[-1], options.get("cu_seqlens"))
    if inplace and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace=True would overwrite a leaf that requires a gradient; pass the output of the lm_head")
    wants = requires_grad_flags(logits)
    call = LossCall(completion_ids, batch, None, wants)
    loss, logps, entropy, measured, others = loss_from_logits(logits, call, inplace=inplace)
    return GRPOLossOutput(loss, logps.detach(), entropy, batch, measured, others)
