"""The implementations that are compared, each `step(inputs) -> (loss, dhidden, dweight)`: one forward and one backward.

All but `floor`, whose loss is None, compute `inputs.grpo_objective`. Beyond it, `ours` and `trl` also return
log-probabilities and entropies, and `ours` metrics; nothing is added to the others to make up for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from inputs import EPSILON, Inputs, grpo_objective
from torch import Tensor

from grpo_kernels import GRPOConfig, fused_grpo_loss

Result = tuple[Tensor | None, Tensor, Tensor]
Step = Callable[[Inputs], Result]


class Peer(NamedTuple):
    """`variants(inputs)`: name of a setting -> step; where there are several, the fastest speaks for the peer."""

    variants: Callable[[Inputs], dict[str, Step]]
    load: Callable[[], object] | None = None  # imports what the peer is made of


def missing(name: str) -> str | None:
    """Why a peer cannot run here, None if it can."""
    load = PEERS[name].load
    try:
        if load is not None:
            load()
    except ImportError as error:
        return f"not installed: {error}"
    return None


def gradients(loss: Tensor, inputs: Inputs) -> Result:
    """Backward by autograd."""
    dhidden, dweight = torch.autograd.grad(loss, (inputs.hidden, inputs.weight))
    return loss.detach(), dhidden, dweight


# --- ours ---------------------------------------------------------------------------------------------------


def _ours(inputs: Inputs) -> dict[str, Step]:
    config = GRPOConfig(aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON)

    def step(inputs: Inputs) -> Result:
        output = fused_grpo_loss(
            inputs.hidden,
            inputs.weight,
            inputs.ids,
            inputs.advantages,
            completion_mask=inputs.mask,
            old_logps=inputs.old_logps,
            ref_logps=inputs.ref_logps,
            config=config,
        )
        return gradients(output.loss, inputs)

    return {"": step}


# --- the floor ----------------------------------------------------------------------------------------------


def _floor(inputs: Inputs) -> dict[str, Step]:
    """The three products at full N and nothing else.

    The (N, V) buffer is allocated once, outside the time: a fused loss has no such buffer, and filling fresh pages
    would raise the floor. The two gradients are allocated in every step, since every implementation has to return
    fresh ones. The logits stand in for their gradient, which has the same shape and type.
    """
    hidden, weight = inputs.flat_hidden.detach(), inputs.weight.detach()
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])

    def step(inputs: Inputs) -> Result:
        torch.mm(hidden, weight.T, out=logits)
        return None, torch.mm(logits, weight), torch.mm(logits.T, hidden)

    return {"": step}


# --- eager torch --------------------------------------------------------------------------------------------


def _eager_loss(inputs: Inputs) -> Tensor:
    log_p = (inputs.hidden @ inputs.weight.T).float().log_softmax(-1)
    return grpo_objective(log_p.gather(-1, inputs.ids.unsqueeze(-1)).squeeze(-1), inputs)


def _eager(inputs: Inputs) -> dict[str, Step]:
    return {"": lambda inputs: gradients(_eager_loss(inputs), inputs)}


def _compiled_eager(inputs: Inputs) -> dict[str, Step]:
    compiled = torch.compile(_eager_loss, fullgraph=True, dynamic=False)
    return {"": lambda inputs: gradients(compiled(inputs), inputs)}


# --- TRL


@functools.cache
def _import_trl() -> tuple[type[torch.autograd.Function], int]:
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    return _ChunkedLogProbFunction, _CHUNKED_LOGPROB_CHUNK_SIZE


def _trl(inputs: Inputs) -> dict[str, Step]:
    """GRPOTrainer's chunked head, called as `add_fused_lm_head` calls it, and the trainer's loss on (B, T)."""
    head, chunk_size = _import_trl()

    def step(inputs: Inputs) -> Result:
        # Arguments: hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs.
        arguments = (inputs.weight, None, inputs.ids.reshape(-1), 1.0, chunk_size, None, 1.0, ("log_probs", "entropy"))
        logps, *_ = head.apply(inputs.flat_hidden, *arguments)  # type: ignore[no-untyped-call]
        return gradients(grpo_objective(logps.view(inputs.ids.shape), inputs), inputs)

    return {f"chunk {chunk_size}": step}


# --- Liger --------------------------------------------------------------------------------------------------


@functools.cache
def _import_liger() -> type[torch.nn.Module]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_class: type[torch.nn.Module] = LigerFusedLinearGRPOLoss
    return loss_class


def _liger(inputs: Inputs) -> dict[str, Step]:
    """Chunks of 1, 2, 4, ... sequences, compiled and not."""
    loss_class = _import_liger()
    sizes = [2**i for i in range(inputs.ids.shape[0].bit_length())]
    return {
        f"chunk {size}{', compiled' if compiled else ''}": functools.partial(
            _liger_step,
            loss_class(
                beta=inputs.beta,
                compiled=compiled,
                chunk_size=size,
                epsilon_low=EPSILON,
                epsilon_high=EPSILON,
                loss_type="grpo",
            ),
        )
        for compiled in (False, True)
        for size in sizes
    }


def _liger_step(liger: torch.nn.Module, inputs: Inputs) -> Result:
    loss, _ = liger(
        inputs.hidden,
        inputs.weight,
        inputs.ids,
        inputs.mask,
        inputs.advantages,
        ref_per_token_logps=inputs.ref_logps,
        old_per_token_logps=inputs.old_logps,
    )
    return gradients(loss, inputs)


PEERS: dict[str, Peer] = {
    "ours": Peer(_ours),
    "floor": Peer(_floor),
    "eager": Peer(_eager),
    "compiled_eager": Peer(_compiled_eager),
    "trl": Peer(_trl, _import_trl),
    "liger": Peer(_liger, _import_liger),
}
