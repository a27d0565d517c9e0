"""TRL: the chunked head of its GRPOTrainer, and the trainer's loss on (B, T)."""

from __future__ import annotations

import functools
import importlib

from torch import Tensor

from ..inputs import Inputs
from . import Implementation, Step, from_logps

_utils = functools.partial(importlib.import_module, "trl.trainer.utils")


def _logps(inputs: Inputs, chunk_size: int, outputs: tuple[str, ...]) -> Tensor:
    """Called as `add_fused_lm_head` does: (hidden, weight, bias, ids, temperature, chunk, softcap, scale, outputs)."""
    logps: Tensor
    logps, *_ = _utils()._ChunkedLogProbFunction.apply(
        inputs.flat_hidden, inputs.weight, None, inputs.ids.view(-1), 1.0, chunk_size, None, 1.0, outputs
    )
    return logps.view(inputs.ids.shape)


def _settings(inputs: Inputs, mode: str) -> dict[str, Step]:
    """The trainer's own chunk, ids per tile, which no option changes.

    Entropies come along in training, as in the trainer; its reference model has log-probabilities alone.
    """
    size = _utils()._CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = ("log_probs",) if mode == "forward" else ("log_probs", "entropy")
    return {f"chunk {size}": from_logps(functools.partial(_logps, chunk_size=size, outputs=outputs), mode)}


IMPLEMENTATIONS = (Implementation("trl", "TRL", _settings, load=_utils, requirement="trl==1.16.0"),)
