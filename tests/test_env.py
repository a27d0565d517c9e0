"""`grpo-kernels env`: what it says of this machine, of one with a GPU, and of one that lacks everything."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from test_cuda_backend import Machine, forget
from test_imports import BLOCKED, run

import grpo_kernels as gk
from grpo_kernels.commands import env
from grpo_kernels.commands.cli import main


@pytest.fixture
def machine(monkeypatch):
    yield Machine(monkeypatch)
    forget()


def test_this_machine(capsys, monkeypatch):
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", "rows")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"grpo_kernels {gk.__version__}") and f"torch {torch.__version__}" in text
    kernels = r"kernels for (avx512|avx2|baseline), torch's threads"
    assert re.search(rf"cpu     .*threads.*{kernels}\n +uses 'cpu': the first that can run", text)
    assert "environment: " in text and "GRPO_KERNELS_STRATEGY=rows" in text
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__ and facts["backends"]["torch"] == ""
    assert facts["devices"][0]["backend"] == "cpu" and facts["devices"][0]["memory"] > 2**20


def gpu(machine, **properties):
    """A machine with one GPU, and what torch says of it."""
    known = SimpleNamespace(name="NVIDIA X", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132)
    known.__dict__.update(properties)
    machine.patch.setattr(torch.cuda, "device_count", lambda: 1)
    machine.patch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    machine.patch.setattr(env, "driver_version", lambda: "570.86.10")
    machine.has(capability=(known.major, known.minor))
    return env.collect()


def test_a_gpu_that_the_kernels_serve(machine):
    facts = gpu(machine)
    device = facts["devices"][1]
    assert device["image"] == "sm_90a" and device["backend"] == "cuda" and device["refused"] == {}
    assert facts["versions"]["cuda_of_kernels"] == facts["versions"]["cuda_of_driver"] == "12.8"
    text = env.render(facts)
    line = "cuda:0  NVIDIA X, compute capability 9.0, 132 multiprocessors, 80.0 GiB, image sm_90a"
    assert f"{line}\n        uses 'cuda': the first that can run, of cuda, triton, torch\n" in text
    assert "CUDA kernels built for: sm_80 sm_90a sm_120 compute_120" in text
    assert "CUDA of torch 13.0, of the kernels 12.8, of the driver 12.8 (570.86.10)" in text.splitlines()[0]
    json.dumps(facts)


def test_a_gpu_that_they_do_not_serve(machine):
    facts = gpu(machine, major=10, minor=3)
    device = facts["devices"][1]
    assert device["image"] is None and device["backend"] == "triton" and "10.3" in device["refused"]["cuda"]
    text = env.render(facts)
    assert "image none\n        uses 'triton'" in text and "        not 'cuda': NVIDIA X has compute capability" in text


def test_a_warning_of_torch_becomes_a_line(monkeypatch, recwarn):
    def is_available():
        import warnings

        warnings.warn("the NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    text = env.render(env.collect())
    assert text.count("warning: the NVIDIA driver on your system is too old") == 1
    assert not [w for w in recwarn if "too old" in str(w.message)]


def test_with_nothing_optional():
    """And CUDA is not initialised by asking."""
    code = "from grpo_kernels.commands.cli import main; main(['env']); main(['env', '--json'])"
    out = run(BLOCKED + code + "; import torch; assert not torch.cuda.is_initialized()")
    text, _, facts = out.partition("\n{")
    assert "uses 'torch': the first that can run, of cpu, torch" in text
    assert "not 'cpu': the compiled CPU kernels cannot be used" in text
    devices = json.loads("{" + facts)["devices"]
    assert devices[0]["backend"] == "torch" and devices[0]["instruction_set"] is None
