"""Plug-ins of the benchmark: right or refused with a sentence, whatever is installed.

GPU-only peers are replaced by stand-ins of their signatures, which insist on what the peers insist on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy

from grpo_kernels.benchmarks.cases import MODES, make_case
from grpo_kernels.benchmarks.implementations import (
    Implementation,
    Result,
    Unsupported,
    cross_entropy,
    implementations,
    liger,
    select,
    verl,
)
from grpo_kernels.benchmarks.inputs import Inputs, make_inputs
from grpo_kernels.benchmarks.reference import errors, off_policy, reference, why_wrong

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # one may name a device that is not there
PEERS = {
    "trl": "trl",
    "liger": "liger_kernel",
    "liger-native": "liger_kernel",
    "verl": "verl",
    "verl-torch": "verl",
    "cut-cross-entropy": "cut_cross_entropy",
    "quack": "quack",
}
GPU_ONLY = {"liger-native": "9.0", "verl": None, "quack": "9.0"}
SERVE = {"floor", "eager", "compiled", "ours", "ours-torch"}  # wherever torch runs


def inputs_of(mode: str, shape: str = "32x128x160", dtype: str = "float32", **options: Any) -> Inputs:
    return off_policy(make_inputs(make_case(shape, dtype, mode=mode, **options), CPU))


def check(implementation: Implementation, inputs: Inputs, mode: str) -> list[str]:
    """Every setting gives what the mode wants, and right; their names."""
    settings = implementation.settings(inputs, mode)
    assert settings
    right = None if implementation.objective == "none" else reference(inputs, mode, implementation.objective)
    for name, step in settings.items():
        result = step(inputs)
        assert isinstance(result, Result)
        for given, like in ((result.dhidden, inputs.hidden), (result.dweight, inputs.weight)):
            assert given is None or (given.numel(), given.dtype) == (like.numel(), like.dtype)
        assert mode != "frozen" or result.dweight is None
        if right is not None:
            wrong = why_wrong(right, result, errors(right, result), inputs.hidden.dtype)
            assert wrong is None, f"{name}: {wrong}"
    return list(settings)


def is_sentence(reason: object) -> bool:
    return isinstance(reason, str) and len(reason.split()) > 2 and "\n" not in reason


# --- all of them, as they are here ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", implementations())
def test_each_is_right_or_refused_with_a_sentence(name: str, mode: str) -> None:
    implementation = implementations()[name]
    reason = implementation.unavailable_reason(CPU, torch.float32)
    if reason is None:
        try:
            check(implementation, inputs_of(mode), mode)
        except Unsupported as unsupported:
            reason = str(unsupported)
    assert reason is None or (is_sentence(reason) and name not in SERVE)


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_implementation_is_found(mode: str) -> None:
    eager = implementations()["eager"]

    def settings(inputs: Inputs, mode: str) -> dict[str, Any]:
        (step,) = eager.settings(inputs, mode).values()

        def wrong(inputs: Inputs) -> Result:
            result = step(inputs)
            if result.dhidden is None:
                return result._replace(logps=-result.logps)
            return result._replace(dhidden=-result.dhidden)

        return {"": wrong}

    with pytest.raises(AssertionError, match="is off by"):
        check(Implementation("wrong", "", settings), inputs_of(mode), mode)


def test_names_are_selected_by_patterns_in_the_order_of_the_table() -> None:
    names = list(implementations())
    assert select(["*"]) == names
    assert select(["eager", "floor"]) == ["floor", "eager"]
    assert select(["ours*", "ours"]) == [name for name in names if name.startswith("ours")]
    assert set(PEERS) <= set(names)
    with pytest.raises(ValueError, match="'none-such' is no implementation; there are ours, "):
        select(["ours", "none-such"])


# --- packages that are missing or broken ------------------------------------------------------------------------------

_BLOCKED = """
import sys
import torch

sought = []

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            sought.append(name)
            raise {error}

sys.meta_path.insert(0, Block())
from grpo_kernels.benchmarks.implementations import implementations

found = [implementations()[name] for name in {names!r}]
assert not sought, "looked for before anybody asked: " + str(sought)
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.version.cuda = "13.0"
for implementation in found:
    print(implementation.name, repr(implementation.unavailable_reason(torch.device("cuda"), torch.bfloat16)), sep="\\t")
assert sought
"""


@pytest.mark.parametrize(
    ("error", "start"),
    [
        ("ModuleNotFoundError(f'No module named {name!r}', name=name)", "not installed (No module named "),
        ("ImportError('libpeer.so: no such file')", "cannot be imported: ImportError: libpeer.so: no such file"),
        ("RuntimeError('wrong version\\nof everything')", "cannot be imported: RuntimeError: wrong version"),
    ],
    ids=["missing", "without a library", "broken"],
)
def test_missing_and_broken_packages_are_reasons_and_sought_only_when_asked(error: str, start: str) -> None:
    """On what looks like a Hopper GPU, so that nothing else is a reason."""
    program = _BLOCKED.format(packages=set(PEERS.values()), error=error, names=list(PEERS))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reasons = dict(line.split("\t") for line in done.stdout.splitlines())
    assert list(reasons) == list(PEERS)
    for name, text in reasons.items():
        reason = text.strip("'\"")
        assert reason.startswith(start), (name, reason)
        assert ("pip install" in reason) == start.startswith("not installed"), (name, reason)


@pytest.mark.parametrize("name", GPU_ONLY)
def test_gpu_only_peers_say_what_they_need(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    unavailable_reason, least = implementations()[name].unavailable_reason, GPU_ONLY[name]
    assert unavailable_reason(CPU, torch.bfloat16) == "needs an NVIDIA GPU"
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for AMD calls its devices "cuda", too
    assert unavailable_reason(GPU, torch.bfloat16) == "needs an NVIDIA GPU"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    if least is not None:
        assert unavailable_reason(GPU, torch.bfloat16) == f"needs compute capability {least}, this is 8.0"


def test_ligers_native_kernels_are_for_hopper_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable_reason = implementations()["liger-native"].unavailable_reason
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert unavailable_reason(GPU, torch.bfloat16) == "its kernels are for compute capability 9.0 alone"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert unavailable_reason(GPU, torch.float32) == "serves bfloat16 alone"


# --- stand-ins --------------------------------------------------------------------------------------------------------


def losses_of(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    assert (hidden.dim(), weight.dim(), ids.dim(), ids.dtype) == (2, 2, 1, torch.int64)
    assert hidden.is_contiguous() and weight.is_contiguous() and ids.is_contiguous()
    return torch_cross_entropy((hidden @ weight.T).float(), ids, reduction="none")


@pytest.mark.parametrize("beta", [0.04, 0.0])
@pytest.mark.parametrize("mode", MODES)
def test_ligers_loss_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, mode: str, beta: float) -> None:
    made = []

    class Loss:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def __call__(self, *tensors: Tensor, ref_per_token_logps: Tensor | None, old_per_token_logps: Tensor) -> Any:
            hidden, weight, ids, mask, advantages = tensors
            assert (ref_per_token_logps is None) == (beta == 0.0) and mask.shape == ids.shape
            logps = -losses_of(hidden.flatten(0, 1), weight, ids.view(-1)).view(ids.shape)
            ratio, advantage = (logps - old_per_token_logps).exp(), advantages[:, None]
            low, high = 1 - made[0]["epsilon_low"], 1 + made[0]["epsilon_high"]
            loss = -torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
            if ref_per_token_logps is not None:
                k3 = (ref_per_token_logps - logps).exp() - (ref_per_token_logps - logps) - 1
                loss = loss + made[0]["beta"] * k3
            return loss.mean(), ()

    def chunk_forward(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return -losses_of(hidden.flatten(0, 1), weight, ids.view(-1)).view(ids.shape)

    function = SimpleNamespace(chunk_forward=chunk_forward)
    stand_in = SimpleNamespace(LigerFusedLinearGRPOLoss=Loss, LigerFusedLinearGRPOFunction=function)
    monkeypatch.setattr(liger, "_grpo", lambda: stand_in)
    inputs = inputs_of(mode, "64x16x32", length=8, beta=beta)
    settings = check(implementations()["liger"], inputs, mode)
    if mode == "forward":
        assert settings == [""] and not made
        return
    assert settings == ["chunk 1", "chunk 4", "chunk 4, not compiled"]
    assert [(o["chunk_size"], o["compiled"]) for o in made] == [(1, True), (4, True), (4, False)]
    assert {(o["loss_type"], o["use_ref_model"]) for o in made} == {("grpo", beta != 0.0)}


def test_ligers_chunks_are_few_and_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_grpo", lambda: SimpleNamespace(LigerFusedLinearGRPOLoss=lambda **options: None))

    def chunks(batch: int, length: int) -> list[str]:
        inputs = make_inputs(make_case(f"{batch * length}x4x8", "float32", length=length), CPU)
        return [name for name in implementations()["liger"].settings(inputs, "step") if "not compiled" not in name]

    assert chunks(64, 16) == ["chunk 1", "chunk 4", "chunk 16"]
    assert chunks(16, 1024) == ["chunk 1", "chunk 4"]
    assert chunks(4, 16384) == ["chunk 1"]


@pytest.mark.parametrize("mode", MODES)
def test_ligers_native_losses_are_turned_into_log_probabilities(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    class Function:
        @staticmethod
        def apply(
            _input: Tensor,
            weight: Tensor,
            target: Tensor,
            temperature: float = 1.0,
            ignore_index: int = -100,
            m_tiles_per_cluster: int = 1,
            return_entropy: bool = False,
        ) -> Tensor:
            assert temperature == 1.0 and not return_entropy
            return losses_of(_input, weight, target)

    stand_in = SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=Function)
    monkeypatch.setattr(liger, "_scaled_cross_entropy", lambda: stand_in)
    assert check(implementations()["liger-native"], inputs_of(mode), mode) == [""]


@pytest.mark.parametrize("beta", [0.04, 0.0])
@pytest.mark.parametrize("mode", MODES)
def test_verls_kernels_get_contiguous_gradients(monkeypatch: pytest.MonkeyPatch, mode: str, beta: float) -> None:
    methods = []

    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none"
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(temperature, float) and temperature == 1.0 and reduction == "none"
        logps = -losses_of(hidden.view(-1, hidden.shape[-1]), weight, labels.view(-1))
        if logps.requires_grad:
            logps.register_hook(contiguous)
        return logps, torch.zeros_like(logps)

    def contiguous(gradient: Tensor) -> None:
        assert gradient.is_contiguous()

    kernels = SimpleNamespace(
        BackwardEnum=SimpleNamespace(_Total_Separate=1, _Split_Dlogits_N=2), set_backward_method=methods.append
    )
    monkeypatch.setattr(verl, "_kernels", lambda: kernels)
    monkeypatch.setattr(verl, "_function", lambda: SimpleNamespace(linear_cross_entropy=linear_cross_entropy))
    settings = check(implementations()["verl"], inputs_of(mode, beta=beta), mode)
    assert (settings, methods) == (([""], [2]) if mode == "forward" else (["split", "whole"], [2, 1]))


def test_verls_kernels_need_a_multiple_of_their_tile() -> None:
    with pytest.raises(Unsupported, match="hidden size 576 is no multiple of 128"):
        implementations()["verl"].settings(make_inputs(make_case("32x576x64", "float32"), CPU), "step")


def test_modules_of_verl_are_imported_without_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package, text in {
        "verl": "import ray_of_nobody",
        "verl/utils": "import omegaconf_of_nobody",
        "verl/utils/experimental": "",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "verl/utils/device.py").write_text("NAME = 'cpu'")
    (tmp_path / "verl/utils/experimental/head.py").write_text("from verl.utils.device import NAME")
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
            del sys.modules[name]
        module = verl._module.__wrapped__("verl.utils.experimental.head")
        assert (module.NAME, Path(module.__file__)) == ("cpu", tmp_path / "verl/utils/experimental/head.py")
        assert "verl" not in sys.modules and "verl.utils" not in sys.modules


@pytest.mark.parametrize("mode", MODES)
def test_cut_cross_entropy_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def linear_cross_entropy(e: Tensor, c: Tensor, targets: Tensor, *, reduction: str, impl: str) -> Tensor:
        assert impl == "torch_compile"
        assert e.requires_grad == (mode != "forward") and c.requires_grad == (mode == "step")
        losses = losses_of(e, c, targets)
        return losses if reduction == "none" else losses.mean()

    monkeypatch.setattr(cross_entropy, "_cut", lambda: SimpleNamespace(linear_cross_entropy=linear_cross_entropy))
    assert check(implementations()["cut-cross-entropy"], inputs_of(mode), mode) == ["torch_compile"]


@pytest.mark.parametrize(
    ("device", "mode", "dtype", "expected"),
    [
        ("cuda", "step", torch.bfloat16, ["cce", "cce, filter_eps=None", "torch_compile"]),
        ("cuda", "forward", torch.float32, ["cce", "torch_compile"]),
        ("cuda", "step", torch.float32, ["torch_compile"]),
        ("cpu", "step", torch.bfloat16, ["torch_compile"]),
    ],
)
def test_cut_cross_entropy_has_kernels_where_they_serve(
    monkeypatch: pytest.MonkeyPatch, device: str, mode: str, dtype: torch.dtype, expected: list[str]
) -> None:
    monkeypatch.setattr(cross_entropy, "_cut", lambda: SimpleNamespace(linear_cross_entropy=None))
    inputs: Any = SimpleNamespace(hidden=SimpleNamespace(is_cuda=device == "cuda", dtype=dtype))
    assert list(implementations()["cut-cross-entropy"].settings(inputs, mode)) == expected


def quack() -> SimpleNamespace:
    """QuACK's three functions: what is whole, what is chunked and scalar, what is without gradients."""

    def linear_cross_entropy_func(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int = -100,
        reduction: str = "mean",
        inplace_backward: bool = False,
    ) -> Tensor:
        assert bias is None
        losses = losses_of(x, weight, target)
        return losses if reduction == "none" else losses.mean()

    def chunked_linear_cross_entropy(
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        chunk_size: int = 4096,
        ignore_index: int = -100,
        reduction: str = "mean",
        tuned: bool = True,
    ) -> Tensor:
        assert reduction == "mean" and chunk_size % 8 == 0 and x.shape[0] % 8 == 0
        return losses_of(x, weight, target).mean()

    def lse_target_epi(a: Tensor, b: Tensor, *, store_d: bool, target: Tensor, tuned: bool) -> dict[str, Tensor]:
        assert not store_d and not tuned and not torch.is_grad_enabled()
        logits = (a @ b).float()
        return {"lse": logits.logsumexp(-1), "target_logit": logits.gather(-1, target[:, None]).squeeze(-1)}

    functions: tuple[Callable[..., Any], ...] = (
        linear_cross_entropy_func,
        chunked_linear_cross_entropy,
        lse_target_epi,
    )
    return SimpleNamespace(**{function.__name__: function for function in functions})


@pytest.mark.parametrize(
    ("shape", "dtype", "fused"),
    [("32x128x160", "bfloat16", True), ("32x128x163", "bfloat16", False), ("32x128x160", "float32", False)],
)
@pytest.mark.parametrize("mode", MODES)
def test_quack_fuses_what_it_can(
    monkeypatch: pytest.MonkeyPatch, mode: str, shape: str, dtype: str, fused: bool
) -> None:
    monkeypatch.setattr(cross_entropy, "_quack", quack)
    settings = check(implementations()["quack"], inputs_of(mode, shape, dtype), mode)
    of_fused = ["whole logits", "epilogue"] if mode == "forward" else ["chunk 4096", "whole logits"]
    assert settings == (of_fused if fused else ["whole logits"])


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_sampling_masks_in_eager_ours_and_the_exact_result(mode: str, share: float) -> None:
    inputs = off_policy(
        make_inputs(make_case("64x32x512", "float32", length=4, mode=mode, kept_ids=7, masked_share=share), CPU)
    )
    mask = inputs.sampling_mask
    assert mask is not None
    assert mask.counts.flatten().tolist().count(7) == 64 * share
    sampled = inputs.ids.flatten()[mask.counts.flatten() > 0]
    assert (mask.ids.view(-1, 7) == sampled[:, None]).any(1).all()
    right = reference(inputs, mode, "grpo")
    for name in ("ours", "eager"):
        result = implementations()[name].settings(inputs, mode)[""](inputs)
        assert why_wrong(right, result, errors(right, result), torch.float32) is None
    other = implementations()["ours-unmasked"].settings(inputs, mode)[""](inputs)
    assert why_wrong(right, other, errors(right, other), torch.float32) is not None
