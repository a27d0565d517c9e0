"""The backends of GPUs: when they can be used, what is said when not, what they refuse.

What the kernels compute is for the tests of all backends, where they run on an emulated GPU.
"""

from __future__ import annotations

import importlib.machinery
import sys
import warnings
from dataclasses import replace
from email.message import Message
from types import ModuleType, SimpleNamespace

import pytest
import torch

import grpo_kernels
from grpo_kernels import kernels as backends
from grpo_kernels.kernels import choose_backend, get_backend
from grpo_kernels.kernels import triton as kernels
from grpo_kernels.kernels.compiled import cuda as cuda_backend
from grpo_kernels.kernels.compiled.base import INTERFACE
from grpo_kernels.kernels.operations import PolicyTransform, Statistics
from grpo_kernels.kernels.torch.backend import TORCH

NAME = "grpo_kernels._cuda"
GPU = torch.device("cuda", 0)


# --- a machine that is not here -------------------------------------------------------------------------------------


class Machine:
    """A GPU with its driver, the torch that sees it, and the CUDA kernels installed beside it."""

    def __init__(self, monkeypatch) -> None:
        self.patch = monkeypatch
        self.module = ModuleType(NAME)
        self.module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
        monkeypatch.setitem(sys.modules, NAME, self.module)
        monkeypatch.setattr(grpo_kernels, "_cuda", self.module, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
        images = {80: "sm_80", 86: "sm_80", 90: "sm_90a", 120: "sm_120"}
        self.module.image_for = lambda capability: images.get(capability, "")
        self.has(
            INTERFACE=INTERFACE, built_for_cuda=12080, built_architectures="sm_80 sm_90a sm_120 compute_120",
            driver_cuda=12080, cuda="13.0", hip=None, is_available=True, get_device_capability=(9, 0),
        )  # fmt: skip
        # The registry as it is outside of the tests, with a Triton backend that needs no GPU.
        for name, load in (("cuda", cuda_backend.load), ("triton", self.load_triton)):
            entry = backends._REGISTRY[name]._replace(load=load, devices=("cuda",))
            monkeypatch.setitem(backends._REGISTRY, name, entry)
        self.triton = ("", "")  # why it is missing, why it does not serve
        forget()

    def has(self, **facts) -> None:
        """Each where it is asked for: of the module, of torch.version or of torch.cuda."""
        for name, value in facts.items():
            if name in ("cuda", "hip"):
                self.patch.setattr(torch.version, name, value)
            elif name == "INTERFACE":
                self.module.INTERFACE = value
            else:
                owner = torch.cuda if hasattr(torch.cuda, name) else self.module
                self.patch.setattr(owner, name, lambda *_, value=value: value, raising=False)

    def without_kernels(self) -> None:
        self.patch.setitem(sys.modules, NAME, None)
        self.patch.delattr(grpo_kernels, "_cuda")

    def load_triton(self):
        missing, unfit = self.triton
        return (None, missing) if missing else (SimpleNamespace(unavailable_reason=lambda device: unfit), "")


def forget() -> None:
    for function in (backends._load, backends.unavailable_reason, backends.auto_choice, backends._warn_once):
        function.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    yield Machine(monkeypatch)
    forget()


def auto(device: torch.device = GPU, dtype: torch.dtype = torch.bfloat16) -> tuple[str, list[str]]:
    """(what "auto" takes in two calls, what is said)."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first, second = (choose_backend("auto", device, dtype) for _ in range(2))
    assert first == second
    return first, [str(warning.message) for warning in said]


# --- whether it can be used -----------------------------------------------------------------------------------------


def test_it_is_taken_where_it_can_be_used(machine):
    kernels, reason = cuda_backend.load()
    assert reason == "" and kernels.name == "cuda" and kernels.statistics.__self__.module is machine.module
    assert auto() == ("cuda", [])
    assert auto(dtype=torch.float64) == ("torch", [])
    assert auto(torch.device("cpu"), torch.float32) == ("cpu", [])


UNUSABLE = {
    "other interface": (dict(INTERFACE=-1), "of another version: build again"),
    "amd": (dict(hip="6.4"), "built for AMD GPUs"),
    "no driver": (dict(driver_cuda=0), r"no NVIDIA driver was found \(libcuda.so.1\): install one"),
    "old driver": (
        dict(driver_cuda=12080, built_for_cuda=13000),
        r"built for CUDA 13.0 and the driver is for CUDA 12.8: update the driver",
    ),
    "older driver": (
        dict(driver_cuda=11080, built_for_cuda=12060),
        "built for CUDA 12.6 and the driver is for CUDA 11.8: update the driver$",
    ),
    "torch without CUDA": (dict(cuda=None, is_available=False), "is built without CUDA: python -m torch"),
    "torch without GPU": (dict(is_available=False), "with CUDA 13.0 sees no GPU: python -m torch"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_why_it_cannot_be_used_is_said_in_a_sentence(machine, name):
    facts, sentence = UNUSABLE[name]
    machine.has(**facts)
    kernels, reason = cuda_backend.load()
    assert kernels is None and "\n" not in reason
    with pytest.raises(ImportError, match=sentence):
        get_backend("cuda")
    name, said = auto()
    assert name == "triton" and len(said) == 1 and reason in said[0] and said[0].endswith("using 'triton'")


@pytest.mark.parametrize("driver", [12000, 12060, 13000, 14000])
def test_a_driver_of_the_same_major_version_will_do(machine, driver):
    machine.has(driver_cuda=driver)
    assert cuda_backend.load()[1] == "" and auto() == ("cuda", [])


@pytest.mark.parametrize(("capability", "sentence"), [
    ((7, 5), "NVIDIA X has compute capability 7.5, and the CUDA kernels need 8.0 or later"),
    (
        (10, 3),
        r"compute capability 10.3, and the CUDA kernels were built for sm_80 sm_90a sm_120 compute_120: update the "
        r"driver, or in a clone run GRPO_KERNELS_CUDA_ARCHS=103 pip .*\.",
    ),
])  # fmt: skip
def test_a_device_without_an_image_falls_back_with_one_warning(machine, capability, sentence):
    machine.has(get_device_capability=capability)
    kernels, _ = cuda_backend.load()
    reason = kernels.unavailable_reason(GPU)
    taken, said = auto()
    assert taken == "triton"
    assert said == [f"grpo_kernels: backend 'cuda' is not available ({reason}); using 'triton'"]
    with pytest.raises(ImportError, match=f"backend='cuda' is not available: .*{sentence}"):
        choose_backend("cuda", GPU, torch.float32)
    assert auto(torch.device("cpu"), torch.float32) == ("cpu", [])


def test_what_it_lacks_is_tritons_or_torchs(machine, monkeypatch):
    from grpo_kernels.kernels.triton.backend import TRITON

    monkeypatch.delenv("TRITON_INTERPRET")
    found, _ = cuda_backend.load()
    assert found.gathered_logits is TRITON.gathered_logits
    assert found.exponentials.__self__.module is machine.module
    monkeypatch.setattr(cuda_backend, "load_triton", lambda: (None, "too old"))
    found, _ = cuda_backend.load()
    assert found.sparse_gradient is TORCH.sparse_gradient and found.fused_logp.__self__.module is machine.module


@pytest.mark.parametrize("pay", [False, True])
def test_where_it_has_no_products_those_of_triton_serve_once_they_pay(machine, monkeypatch, pay):
    from grpo_kernels.kernels.launch import LAUNCHES
    from grpo_kernels.kernels.triton.backend import TRITON

    machine.has(has_products=False)
    monkeypatch.setitem(LAUNCHES, "interpreter", LAUNCHES["sm100"]._replace(products_pay=pay))
    table = replace(TRITON, fused_logp=lambda *given: given, fused_exponentials=lambda *given: given)
    monkeypatch.setattr(cuda_backend, "load_triton", lambda: (table, ""))
    found, _ = cuda_backend.load()
    hidden, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    assert found.fused_products(hidden, weight) == (("exponentials", "logp") if pay else ())
    chunk, out = SimpleNamespace(hidden=hidden), torch.zeros(2, 8)
    assert found.fused_logp(chunk, True) == (chunk, True) and found.fused_exponentials(chunk, out) == (chunk, out)
    monkeypatch.setattr(cuda_backend, "load_triton", lambda: (None, "too old"))
    assert cuda_backend.load()[0].fused_products(hidden, weight) == ()


def test_an_installation_without_cuda_kernels_is_a_choice(machine):
    machine.without_kernels()
    assert "no CUDA kernels" in cuda_backend.load()[1] and not cuda_backend.installed()
    assert auto() == ("triton", [])
    machine.triton = ("", "it is too old")
    forget()
    taken, (said,) = auto()
    assert taken == "torch" and "'cuda' is not available (this installation has no" in said
    assert "'triton' is not available (it is too old); using 'torch'" in said


@pytest.mark.parametrize(("of_torch", "wheel"), [("13.2", "cu130"), ("12.6", "cu128"), (None, "cu130")])
def test_the_wheel_for_this_torch_is_named_where_wheels_are_published(machine, of_torch, wheel):
    machine.without_kernels()
    machine.has(cuda=of_torch)
    published = Message()
    published["Version"] = "0.1.0+cpu"
    machine.patch.setattr(cuda_backend, "metadata", lambda name: published)
    build = "run GRPO_KERNELS_CUDA=1 pip install . in a clone"
    assert cuda_backend.load()[1] == f"this installation has no CUDA kernels: {build}"
    for url in ("Repository, https://github.com/owner/name", "Wheels, https://owner.github.io/name/whl/"):
        published["Project-URL"] = url
    command = f"pip install grpo-kernels==0.1.0+{wheel} --extra-index-url https://owner.github.io/name/whl/{wheel}/"
    assert f"install the wheel +{wheel} ({command}), or {build}" in cuda_backend.load()[1]


def test_a_module_that_cannot_be_imported(machine):
    machine.without_kernels()
    machine.patch.setattr(cuda_backend, "find_spec", lambda name, package: name)
    taken, (said,) = auto()
    assert taken == "triton" and "the compiled CUDA kernels cannot be imported" in said


# --- Triton -----------------------------------------------------------------------------------------------------------


def test_what_it_needs_is_said(monkeypatch):
    import triton

    assert kernels.why_unusable().startswith("TRITON_INTERPRET=1 is set: the interpreter computes bfloat16 wrongly")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.why_unusable() == ""
    monkeypatch.setattr(triton, "__version__", "3.3.1+git")
    assert kernels.why_unusable() == "Triton 3.3.1+git is older than 3.4, which comes with torch 2.8"
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    assert kernels.why_unusable() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.why_unusable() == "Triton needs a GPU, and torch sees none"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.why_unusable().startswith("Triton cannot be imported: ")


def test_auto_prefers_it_on_a_gpu(monkeypatch):
    assert choose_backend("auto", torch.device("cpu"), torch.float32) == "cpu"
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, device: "not here" if name == "cuda" else "")
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"
    assert choose_backend("auto", torch.device("cuda"), torch.float64) == "torch"


def test_the_interpreter_notices_a_wrong_address():
    """What the tests rely on: a kernel that reads past its tensors is caught."""
    from grpo_kernels.kernels.triton import rows

    logits, ids = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
    short = logits[:, :5]  # eight columns are promised below
    with pytest.raises(Exception, match="lie outside the launch"):
        rows.statistics_kernel[(1,)](
            rows.Logits(short, None, 9, 8), ids, ids, 0, torch.ones(3), Statistics.empty(3, ids.device), 3,
            rows.scalars(PolicyTransform()), OPTIONS=rows.RowOptions(False, True, 4, 16),
        )  # fmt: skip
