"""`grpo-kernels env`: what it says of this machine, of one with a GPU, and of one that lacks everything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from test_cuda_backend import Machine, forget
from test_imports import BLOCKED, run

import grpo_kernels as gk
from grpo_kernels.commands import env
from grpo_kernels.commands.cli import main
from grpo_kernels.kernels.compiled import base


@pytest.fixture
def machine(monkeypatch):
    yield Machine(monkeypatch)
    forget()


def test_this_machine(capsys, monkeypatch):
    monkeypatch.setenv("GRPO_KERNELS_DEBUG", "0")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"grpo_kernels {gk.__version__}") and f"torch {torch.__version__}" in text
    kernels = r"kernels for (avx512|avx2|baseline), torch's threads"
    assert re.search(rf"cpu     .*threads.*{kernels}\n +uses 'cpu': the first that can run", text)
    assert "environment: " in text and "GRPO_KERNELS_DEBUG=0" in text
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
    machine.has(get_device_capability=(known.major, known.minor))
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


def test_triton_does_not_run_in_its_interpreter():
    """Which is wrong in bfloat16 where the tests do not repair it: without them neither by name, nor silently."""
    code = (
        "import torch, grpo_kernels; from grpo_kernels.commands.cli import main; main(['env'])\n"
        "assert 'triton' not in grpo_kernels.available_backends()\n"
        "x = torch.zeros(1, 2, 3)\n"
        "grpo_kernels.fused_logps(x, torch.zeros(4, 3), torch.zeros(1, 2).long(), backend='triton')"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "not 'triton': TRITON_INTERPRET=1 is set: the interpreter computes bfloat16 wrongly" in found.stdout
    assert "backend='triton' does not serve torch.float32 logits on cpu" in found.stderr


def test_with_nothing_optional():
    """And CUDA is not initialised by asking."""
    code = "from grpo_kernels.commands.cli import main; main(['env']); main(['env', '--json'])"
    out = run(BLOCKED + code + "; import torch; assert not torch.cuda.is_initialized()")
    text, _, facts = out.partition("\n{")
    assert "uses 'torch': the first that can run, of cpu, torch" in text
    assert "not 'cpu': the compiled CPU kernels cannot be used" in text
    devices = json.loads("{" + facts)["devices"]
    assert devices[0]["backend"] == "torch" and devices[0]["instruction_set"] is None


def test_without_numpy_and_transformers_a_report_is_written_and_torch_is_quiet(tmp_path):
    """NumPy and the trainer's packages are none of this package's dependencies."""
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    blocked = "import sys; sys.modules.update(dict.fromkeys(('numpy', 'transformers', 'accelerate', 'tqdm', 'yaml')));"
    code = f"{blocked} from grpo_kernels.commands.cli import main; sys.exit(main(['report', {str(tmp_path)!r}]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr, found.stdout) == (0, "", f"{tmp_path / 'report.html'}\n")


def test_why_the_cpu_kernels_were_not_built(machine, tmp_path):
    """What the build said: pip shows nothing of it."""
    (tmp_path / "_cpu.missing").write_text("Python.h is not in /usr/include\n")
    machine.patch.setattr(base, "PACKAGE", tmp_path)
    machine.patch.setitem(sys.modules, "grpo_kernels._cpu", None)
    machine.patch.delattr(gk, "_cpu", raising=False)
    forget()
    text = env.render(env.collect())
    assert "not 'cpu': the compiled CPU kernels cannot be used: Python.h is not in /usr/include\n" in text


def test_ctrl_c_is_a_sentence_and_a_closed_pipe_is_quiet(monkeypatch, capfd):
    def interrupted(**facts):
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "collect", interrupted)
    assert main(["env"]) == 130 and capfd.readouterr().err == "\ngrpo-kernels env: interrupted\n"
    command = f"{sys.executable} -m grpo_kernels env 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (141, "", "")
