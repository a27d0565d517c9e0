"""Steps of the peers torch, torchtitan, TRL, Liger and verl, and of yardsticks with the same matrix products.

Where a peer computes log-probabilities, GRPO's objective in plain torch follows them. The yardsticks are fused plain
cross-entropy, and compute the mean of -logp. To add one, write a function of inputs and mode that returns a step, and
its entry in IMPLEMENTATIONS of table.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .baselines import Result, Step, Unsupported, make_step
from .cases import DIVERGENCES
from .inputs import EPSILON, Inputs, token_losses

_TORCH_CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
_TITAN_CHUNKS = 8  # torchtitan's default
_LIGER_CHUNK_TOKENS = 4096  # at most
_VERL_TILE = 128  # the Triton kernels assume that it divides the hidden size
_QUACK_ALIGNMENT = 8  # its products in chunks serve sizes that are multiples of this


def need_nvidia(inputs: Inputs, least: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Returns the compute capability of the inputs' NVIDIA GPU; `Unsupported` below `least`, or without such a GPU."""
    if not inputs.hidden.is_cuda or torch.version.cuda is None:
        raise Unsupported("needs an NVIDIA GPU")
    capability = torch.cuda.get_device_capability(inputs.hidden.device)
    if capability < least:
        raise Unsupported(f"needs compute capability {least[0]}.{least[1]}, this is {capability[0]}.{capability[1]}")
    return capability


def load(name: str, extra: str = "peers") -> ModuleType:
    """Imports a module of a peer, which the `extra` of this package installs, or pip where it is verl's or vLLM's.

    `Unsupported`, with the reason, where it is not installed, or where importing it raises anything.
    """
    try:
        return _load_verl(name) if name.startswith("verl.") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        # verl's dependencies pin transformers and bring Ray; its modules that are used here need none of them.
        requirement = {"verl": "--no-deps verl", "vllm": "vllm"}.get(name.split(".")[0], f"'grpo-kernels[{extra}]'")
        raise Unsupported(f"not installed ({error}): pip install {requirement}") from error
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise Unsupported(f"cannot be imported: {type(error).__name__}: {first_line}") from error


def _load_verl(name: str) -> ModuleType:
    """Imports a module of verl with empty packages in place of `verl` and `verl.utils`, which import Ray, TensorDict,
    OmegaConf and more; the modules that are used here need none of these."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'verl'", name="verl")
    root = Path(spec.submodule_search_locations[0])
    folders = {"verl": root, "verl.utils": root / "utils"}
    empty = {package: ModuleType(package) for package in folders if package not in sys.modules}
    for package, module in empty.items():
        module.__path__ = [str(folders[package])]
    sys.modules.update(empty)
    try:
        return importlib.import_module(name)
    finally:
        for package in empty:
            del sys.modules[package]


def torch_head(inputs: Inputs, mode: str, chunked: bool) -> Step:
    """Returns the step of torch's `linear_cross_entropy` without a reduction, over all logits in the inputs' type.

    `chunked` computes them in chunks, and again in the backward. Chunks that torch chooses by itself have 32 tokens or
    fewer, which takes several times as long on a CPU.
    """
    function = getattr(functional, "linear_cross_entropy", None)
    if function is None:
        raise Unsupported(f"torch {torch.__version__} has no linear_cross_entropy, 2.13 has")
    options = {}
    if chunked:
        size = _TORCH_CHUNK_TOKENS[inputs.hidden.device.type]
        options["options"] = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=size, chunking_method=None)

    def logps(inputs: Inputs) -> Tensor:
        losses = function(inputs.flat_hidden, inputs.weight, inputs.ids.view(-1), reduction="none", **options)
        return -losses.view(inputs.ids.shape).float()

    return make_step(mode, logps)


def torchtitan(inputs: Inputs, mode: str) -> Step:
    """Returns the step of its ChunkedLossWrapper, written down here without the package.

    Each chunk of hidden states is cut off from the graph before it; a compiled loss of its logits and its backward
    follow at once. Gradients of hidden states go into a float32 buffer, those of the head are summed by autograd.
    """
    if mode in DIVERGENCES:
        raise Unsupported("has no divergence to a teacher's distribution")

    has_gradient, size = mode != "forward", math.ceil(inputs.ids.numel() / _TITAN_CHUNKS)

    @partial(torch.compile, dynamic=False)
    def loss_of(logits: Tensor, ids: Tensor, share: Tensor, *objective_inputs: Tensor) -> tuple[Tensor, Tensor]:
        logps = -functional.cross_entropy(logits.float(), ids, reduction="none")
        old_logps, ref_logps, advantages = objective_inputs
        return (token_losses(logps, old_logps, ref_logps, advantages, inputs.beta) * share).sum(), logps.detach()

    def step(inputs: Inputs) -> Result:
        hidden, weight = inputs.flat_hidden.detach(), inputs.weight.detach().requires_grad_(mode == "step")
        share = inputs.mask / inputs.mask.sum(-1, keepdim=True) / len(inputs.mask)
        per_token = inputs.ids, share, inputs.old_logps, inputs.ref_logps, inputs.advantages[:, None].expand_as(share)
        flat_inputs = [x.flatten() for x in per_token]
        dhidden, chunk_results = torch.zeros_like(hidden, dtype=torch.float32), []
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            chunk = hidden[rows].detach().requires_grad_(has_gradient)
            with torch.set_grad_enabled(has_gradient):
                loss, logps = loss_of(functional.linear(chunk, weight), *(x[rows] for x in flat_inputs))
            if has_gradient:
                loss.backward()
                assert chunk.grad is not None
                dhidden[rows] = chunk.grad
            chunk_results.append((loss.detach(), logps))
        losses, logps = zip(*chunk_results, strict=True)
        total, all_logps = torch.stack(losses).sum(), torch.cat(logps).view(inputs.ids.shape)
        return Result(total, all_logps, dhidden.to(hidden.dtype), weight.grad)

    return step


def trl(inputs: Inputs, mode: str) -> Step:
    """Returns the step of its GRPOTrainer's head, with the trainer's chunk of ids, which no option changes; for a
    divergence that of its DistillationTrainer's function.

    Entropies are computed in training, as in the trainer; its reference model has log-probabilities only.
    """
    utils = load("trl.trainer.utils")
    size = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = ("log_probs",) if mode == "forward" else ("log_probs", "entropy")

    def logps(inputs: Inputs) -> Tensor:
        """Calls it as TRL does: hidden, weight, bias, ids, temperature, chunk, softcap, scale, outputs."""
        token_logps, *_ = utils._ChunkedLogProbFunction.apply(
            inputs.flat_hidden, inputs.weight, None, inputs.ids.view(-1), 1.0, size, None, 1.0, outputs
        )
        return token_logps.view(inputs.ids.shape)

    if mode not in DIVERGENCES:
        return make_step(mode, logps)
    function = load("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def divergence(inputs: Inputs) -> Tensor:
        hidden, weight = _teacher(inputs)
        token_divergences: Tensor = function.apply(
            inputs.flat_hidden, inputs.weight, None, hidden, weight, None, DIVERGENCES[mode]
        )[0]
        return token_divergences.mean()

    return make_step(mode, logps, divergence=divergence)


def _teacher(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the teacher's hidden states (N, H) and weight (V, H)."""
    assert inputs.teacher is not None
    return inputs.teacher.hidden.flatten(0, 1), inputs.teacher.weight


def liger(inputs: Inputs, mode: str) -> Step:
    """Returns the step of its GRPO loss, compiled by default, in chunks of up to 4,096 tokens, which are faster than
    its default of one completion.

    Log-probabilities are those that the loss computes for a reference model; a divergence is its loss for distillation,
    by default in chunks of 1,024 tokens.
    """
    module = load("liger_kernel.chunked_loss.grpo_loss")

    def logps(inputs: Inputs) -> Tensor:
        return module.LigerFusedLinearGRPOFunction.chunk_forward(inputs.hidden, inputs.weight, inputs.ids)

    if mode == "forward":
        return make_step(mode, logps)
    if mode in DIVERGENCES:
        jsd = load("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(0.0, 1.0, DIVERGENCES[mode])
        return make_step(
            mode, logps, divergence=lambda x: jsd(x.flat_hidden, x.weight, *_teacher(x), x.ids.view(-1))
        )  # fmt: skip
    batch, length = inputs.ids.shape
    module_loss = module.LigerFusedLinearGRPOLoss(
        chunk_size=max(1, min(batch, _LIGER_CHUNK_TOKENS // length)), beta=inputs.beta,
        use_ref_model=inputs.beta != 0.0, loss_type="grpo", epsilon_low=EPSILON, epsilon_high=EPSILON,
    )  # fmt: skip

    def loss(inputs: Inputs) -> Result:
        value, _ = module_loss(
            inputs.hidden, inputs.weight, inputs.ids, inputs.mask, inputs.advantages,
            ref_per_token_logps=inputs.ref_logps if inputs.beta else None, old_per_token_logps=inputs.old_logps,
        )  # fmt: skip
        return Result(value)

    return make_step(mode, logps, loss)


def liger_native(inputs: Inputs, mode: str) -> Step:
    """Returns the step of Liger's kernels for Hopper; `Unsupported` elsewhere, where Liger falls back to torch."""
    if need_nvidia(inputs, (9, 0)) != (9, 0):
        raise Unsupported("its kernels are for compute capability 9.0 only")
    if inputs.hidden.dtype != torch.bfloat16:
        raise Unsupported("serves bfloat16 only")
    load("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90", "peers-gpu")
    module = load("liger_kernel.ops.fused_linear_scaled_cross_entropy", "peers-gpu")
    function = module.LigerFusedLinearScaledCrossEntropyFunction

    def logps(inputs: Inputs) -> Tensor:
        return -function.apply(inputs.flat_hidden, inputs.weight, inputs.ids.view(-1)).view(inputs.ids.shape)

    return make_step(mode, logps)


def verl(inputs: Inputs, mode: str) -> Step:
    """Returns the step of verl's Triton kernels."""
    need_nvidia(inputs)
    hidden_size = inputs.hidden.shape[-1]
    if hidden_size % _VERL_TILE:
        raise Unsupported(f"hidden size {hidden_size} is no multiple of {_VERL_TILE}")
    function = load("verl.utils.kernel.linear_cross_entropy")
    load("verl.utils.kernel.kernels")  # imported here, where `load` catches errors, and not by the first call

    def logps(inputs: Inputs) -> Tensor:
        token_logps, _ = function.linear_cross_entropy(inputs.hidden, inputs.weight, inputs.ids, 1.0, "none")
        return token_logps.view(inputs.ids.shape)

    return make_step(mode, logps)


def verl_torch(inputs: Inputs, mode: str) -> Step:
    """Returns the step of verl's head in plain torch, in chunks."""
    head = load("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    return make_step(mode, lambda inputs: head(inputs.hidden, inputs.weight, inputs.ids)[0])


def _cross_entropy(function: Callable[..., Tensor], mode: str, **options: Any) -> Step:
    """Returns the step of a fused cross-entropy: `function(hidden (N, H), weight, ids (N,), reduction=...)`."""

    def logps(inputs: Inputs) -> Tensor:
        # Detached: even under no_grad some do more for inputs that require gradients.
        flat = inputs.flat_hidden.detach(), inputs.weight.detach(), inputs.ids.view(-1)
        return -function(*flat, reduction="none", **options).view(inputs.ids.shape)

    def loss(inputs: Inputs) -> Result:
        return Result(function(inputs.flat_hidden, inputs.weight, inputs.ids.view(-1), reduction="mean", **options))

    return make_step(mode, logps, loss)


def cut_cross_entropy(inputs: Inputs, mode: str) -> Step:
    """Returns the step of its Triton kernels, which leave out small gradients; of its compiled torch on a CPU, and for
    gradients of types of more than 16 bits."""
    function = load("cut_cross_entropy").linear_cross_entropy
    kernels = inputs.hidden.is_cuda and (mode == "forward" or inputs.hidden.dtype.itemsize == 2)
    return _cross_entropy(function, mode, impl="cce" if kernels else "torch_compile")


def quack(inputs: Inputs, mode: str) -> Step:
    """Returns the step of its cross-entropy in chunks; without a gradient that of its product with the log-sum-exp in
    the epilogue, as QuACK itself evaluates a loss."""
    need_nvidia(inputs, (9, 0))
    sizes = inputs.ids.numel(), *inputs.weight.shape
    if inputs.hidden.dtype.itemsize != 2 or any(size % _QUACK_ALIGNMENT for size in sizes):
        raise Unsupported(f"serves types of 16 bits and sizes that are multiples of {_QUACK_ALIGNMENT} in chunks")
    module = load("quack.linear_cross_entropy", "peers-gpu")

    def epilogue(hidden: Tensor, weight: Tensor, ids: Tensor, reduction: str) -> Tensor:
        outputs = module.lse_target_epi(hidden, weight.mT, store_d=False, target=ids, tuned=False)
        return outputs["lse"] - outputs["target_logit"]

    return _cross_entropy(epilogue if mode == "forward" else module.chunked_linear_cross_entropy, mode)
