"""fused_policy_loss: a user-defined loss over log-probabilities, without a new kernel and without (N, V) logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .checks.arguments import num_sequences_of
from .checks.plain import check_shape, gather_dtensor
from .config import check_count, check_one_of
from .head.chunk_size import Selection
from .head.gradients import PrecomputedGradients, compute_in_forward
from .head.logps_op import LogpsCall, begin_logps, check_call
from .head.loop import run
from .head.products import pinned_matmul_precision
from .head.shared import hide_from_dispatch_modes, requires_grad_flags, statistics_dtype
from .inputs import check_logps_inputs
from .kernels.operations import Rows, Statistics
from .objective.sequences import Sequences
from .sampling_mask import SamplingMask


@dataclass(frozen=True)
class PolicyChunk:
    """The argument of a loss function: n unmasked tokens, in the order of the batch.

    logps, entropy: (n,) float32, nats; differentiate through them. entropy is None unless entropy=True.
    index: (n,) int64, the tokens' places in the flattened completion_ids.
    sequence: (n,) int64, the sequence of each token, 0 .. S - 1.
    """

    logps: Tensor
    entropy: Tensor | None
    index: Tensor
    sequence: Tensor
    num_tokens: int | None = None  # of the batch, like num_sequences; None: not known
    num_sequences: int | None = None

    def tokens(self, x: Tensor) -> Tensor:
        """Returns these tokens' values of a tensor shaped like completion_ids."""
        if self.num_tokens is not None:
            check_shape("x", x, x.numel() == self.num_tokens, f"one value for each of {self.num_tokens} tokens")
        return x.reshape(-1)[self.index]

    def sequences(self, x: Tensor) -> Tensor:
        """Returns for every token its sequence's value of a tensor (S,)."""
        if self.num_sequences is not None:
            fits = x.numel() == self.num_sequences
            check_shape("x", x, fits, f"one value for each of {self.num_sequences} sequences")
        return x.reshape(-1)[self.sequence]

    def sequence_sum(self, x: Tensor) -> Tensor:
        """Returns (n,): every token gets the sum of x (n,) over its sequence; whole sums need level="sequence"."""
        return _SequenceSum.apply(x, self.sequence)


class _SequenceSum(torch.autograd.Function):
    """The sum over a token's neighbours in its sequence, whose derivative is that of the gradients. In a fixed order:
    index_add, and autograd's backward of a gather, add by atomics on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: Tensor) -> Tensor:
        ctx.sequence = sequence
        _, lengths = sequence.unique_consecutive(return_counts=True)
        sequences = Sequences(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), None, len(sequence))
        values = x if x.is_floating_point() else x.double()  # which holds sums of integers
        return sequences.to_tokens(sequences.sum(values)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return _SequenceSum.apply(outer[0], ctx.sequence), None


LossFn = Callable[[PolicyChunk], Tensor]


def fused_policy_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    loss_fn: LossFn,
    *,
    level: str = "token",
    entropy: bool = False,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    lm_head_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    sparse_backward: float | None = None,
    logits_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Returns the sum over chunks of loss_fn(PolicyChunk), scalar (), differentiable in hidden, weight and bias.

    `loss_fn` returns a scalar per chunk (or one value per token, which is summed). It is differentiated by autograd on
    the small (n,) tensors while the chunk's logits are at hand, so the whole costs 6 N H V operations. It must be a sum
    over tokens (level="token": chunks are any runs of tokens) or over sequences (level="sequence": chunks hold all
    unmasked tokens of each of their sequences; sequences longer than a chunk cost 8 N H V). Normalisers are the
    caller's:

        def loss_fn(chunk):
            ratio = (chunk.logps - chunk.tokens(old_logps)).exp()
            return -(ratio * chunk.sequences(advantages)).sum() / num_tokens

    Gradients flow only to hidden, weight and bias: where the value also depends on another tensor that requires a
    gradient, say a learned coefficient in the closure of `loss_fn`, this raises; detach it, or use `fused_logps`.

    Shapes and errors as in `fused_grpo_loss`, sparse_backward and logits_dtype as in `GRPOConfig`. It calls back into
    Python, so torch.compile breaks the graph here; use `fused_logps` with autograd where that matters.
    """
    check_one_of("level", level, ("token", "sequence"))
    if chunk_rows is not None:
        chunk_rows = check_count("chunk_rows", chunk_rows)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; expected a function of a PolicyChunk")
    lm_head_weight, lm_head_bias = gather_dtensor(lm_head_weight), gather_dtensor(lm_head_bias)
    scores = check_logps_inputs(
        "fused_policy_loss", hidden, lm_head_weight, lm_head_bias, ids=completion_ids, mask=completion_mask,
        transform=(temperature, logit_scale, logit_softcap), backend=backend, entropy=entropy,
        sampling_mask=sampling_mask, sparse_backward=sparse_backward, cu_seqlens=cu_seqlens, logits_dtype=logits_dtype,
    )  # fmt: skip
    num_sequences_of(completion_ids, cu_seqlens)  # packed tokens have offsets
    call = _Call(
        scores, chunk_rows, cu_seqlens, loss_fn, level, wants=requires_grad_flags(hidden, lm_head_weight, lm_head_bias),
        grad_enabled=torch.is_grad_enabled(),
    )  # fmt: skip
    with pinned_matmul_precision(hidden.device):
        run = partial(_run, call=call)
        return compute_in_forward("fused_policy_loss", run, hidden, lm_head_weight, lm_head_bias)[0]


@dataclass(frozen=True)
class _Call:
    scores: LogpsCall
    chunk_rows: int | None
    cu_seqlens: Tensor | None  # None: a (B, T) batch
    loss_fn: LossFn
    level: str
    wants: tuple[bool, ...]
    grad_enabled: bool  # in the caller's context; inside an autograd.Function it is always off


@hide_from_dispatch_modes
def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call
) -> tuple[tuple[Tensor, ...], PrecomputedGradients]:
    scores, device, wants = call.scores, hidden.device, call.wants
    ids, dtype = scores.tokens.completion_ids, statistics_dtype(scores.compute_dtype or hidden.dtype)
    stats = Statistics.zeros(ids.numel(), device, dtype)
    check_call(scores, weight.shape[0], call.cu_seqlens)
    head, tokens, mask, _, selection = begin_logps(
        (hidden, weight, bias), scores, stats, wants=wants, chunk_rows=call.chunk_rows
    )
    if call.cu_seqlens is None:
        span = torch.full((ids.shape[0],), ids.shape[1], device=device)
    else:
        span = call.cu_seqlens.long().diff()
    sequence = torch.arange(len(span), device=device).repeat_interleave(span, output_size=ids.numel())
    index = torch.arange(ids.numel(), device=device) if mask is None else mask.nonzero().squeeze(1)
    loss = _UserLoss(call, stats, index, sequence, len(span))
    lengths: list[int] = torch.bincount(sequence[index], minlength=len(span)).tolist()
    if scores.tokens.allowed_ids is None:
        selection = Selection(index, None, index, lengths)
    has_entropy = scores.want_entropy
    run(tokens, loss, selection, gradients=any(wants), has_entropy=has_entropy, every_row=False)
    if not any(wants):
        loss.gradients()
    return (loss.total,), head.gradients()


class _UserLoss:
    """A Loss (head/loop.py) that differentiates the user's function. total (): the sum of its values."""

    def __init__(self, call: _Call, stats: Statistics, index: Tensor, sequence: Tensor, count: int) -> None:
        self.num_sequences = count
        self.call, self.stats, self.index, self.sequence = call, stats, index, sequence
        self.needs_sequences = call.level == "sequence"
        self.needs_batch = call.scores.tokens.allowed_ids is not None  # its chunks are not in the order of the tokens
        self.total = torch.zeros((), dtype=stats.logp.dtype, device=index.device)
        self._gradients = torch.zeros((2, len(sequence)), dtype=stats.logp.dtype, device=index.device)

    def __call__(self, rows: Rows, sequences: slice | None = None) -> tuple[Tensor, Tensor]:
        return self._differentiate(rows.tokens(self.index.device))

    def gradients(self) -> tuple[Tensor, Tensor]:
        return self._differentiate(self.index)

    def _differentiate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Calls the user's function with the tokens `index`, and differentiates it on small tensors."""
        call, leaves = self.call, [self.stats.logp[index].requires_grad_()]
        if call.scores.want_entropy:
            leaves.append(self.stats.entropy[index].requires_grad_())
        with torch.enable_grad():
            logps, *entropy = (x.clone() for x in leaves)  # a leaf could not be changed in place
            counts = len(self.sequence), self.num_sequences
            chunk = PolicyChunk(logps, entropy[0] if entropy else None, index, self.sequence[index], *counts)
            value = call.loss_fn(chunk)
            if not isinstance(value, Tensor) or value.numel() not in (1, len(index)):
                came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"loss_fn returned {came}; expected a scalar tensor, or one value per token ({len(index)},)"
                )
            value = value.sum()
        if call.grad_enabled:
            _refuse_other_leaves(value, leaves)
        self.total = self.total + value.detach()
        if value.requires_grad:
            gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
            for x, gradient in zip(self._gradients, gradients, strict=False):
                x.index_copy_(0, index, gradient)
        return self._gradients[0], self._gradients[1]


def _refuse_other_leaves(value: Tensor, leaves: list[Tensor]) -> None:
    """Raises where a gradient of `value` would also go to a leaf besides `leaves`, where it would be lost."""
    nodes = [value.grad_fn] if value.grad_fn is not None else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
        if leaf is not None and not any(leaf is known for known in leaves):
            raise ValueError(
                f"loss_fn depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient, and which "
                "is not in the chunk (it comes from the closure, itself or through other tensors): detach what is "
                "constant, or use fused_logps with autograd, where it gets its gradient"
            )
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        nodes += following
