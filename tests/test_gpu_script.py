"""bench/gpu.py without a GPU: a stage has its share of the time; what crashes, hangs or is wrong costs itself alone;
peers arrive in parts."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import gpu
import pytest

from grpo_kernels.commands.bench.cases import SETS
from grpo_kernels.commands.bench.table import select

ROOT = Path(__file__).resolve().parents[1]
# Python imports this when it starts. The crash at large vocabularies is found by the headline, not by the check.
BACKEND = """
import os, sys
others = "pytest", "--stages", "stdin.readline", "resource_tracker"  # the last: xdist's and multiprocessing's
if not any(word in " ".join(sys.orig_argv) for word in others):
    from dataclasses import replace
    from grpo_kernels import kernels

    def load(name):
        table = kernels.get_backend("torch")

        def statistics(chunk):
            table.statistics(chunk)
            if chunk.logits.shape[1] > 1000:
                os._exit(7)

        def gradient(chunk, dlogp, dentropy, out):
            table.gradient(chunk, dlogp, dentropy, out)
            if name == "cuda":
                out[:, ::2] = 0

        return replace(table, name=name, statistics=statistics, gradient=gradient), ""

    for name in ("cuda", "triton"):
        entry = kernels._REGISTRY["torch"]._replace(load=lambda name=name: load(name), devices=("cpu",))
        kernels._REGISTRY[name] = entry
"""
# Two for each worker; those of 2 and 3 are for the worker that comes after.
TESTS = """
import os, time, pytest

broken = False

@pytest.mark.parametrize("what", ["passes", "crashes", "hangs", "2", "fails", "3", "4", "5", "of-cuda"])
def test_of_a_device(what):
    global broken
    if what == "crashes": os._exit(3)
    if what == "hangs": time.sleep(600)
    broken = broken or what == "fails"
    assert not broken, "CUDA error: an illegal memory access was encountered"
    assert "cuda" not in what
"""


def test_a_hang_a_wrong_result_and_a_crash_are_named_and_left_out_of_what_follows(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BACKEND)
    # Below pyproject.toml, and far from the conftest.py that skips such tests without a GPU.
    tests = ROOT / "build" / f"rehearsal-{os.getpid()}" / "test_device.py"
    tests.parent.mkdir(parents=True)
    tests.write_text(TESTS)
    (tests.parent / "conftest.py").write_text('pytest_plugins = ["outcomes"]\n')
    output, built = tmp_path / "gpu.json", {"status": "ok", "seconds": 1.0}
    resumed = {"environment": {}, "sources": gpu.digest_of_sources(), "left_out": {}, "stages": {"build": built}}
    output.write_text(json.dumps(resumed))
    stages = ["check", "headline", "tests"]
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--device", "cpu", "--shapes", "tiny:64", "--resume"]
    command += ["--silence", "15", "--output", str(output), "--tests", str(tests), "--stages", *stages]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    try:
        ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    finally:
        shutil.rmtree(tests.parent)
    found = json.loads(output.read_text())
    assert ended.returncode == 1 and found["stages"]["build"] == built
    assert {name: found["stages"][name]["status"] for name in stages} == dict.fromkeys(stages, "failed")
    assert found["stages"]["check"]["triton"] == found["stages"]["check"]["torch"] == "ok"
    assert set(found["left_out"]) == {"cuda", "triton"}
    assert "lines failed" in found["left_out"]["cuda"] and "ended with 7" in found["left_out"]["triton"]
    (case,) = found["headline"]["cases"]
    assert {name for name, one in case["implementations"].items() if "seconds" in one} == {"floor"}
    assert found["stages"]["headline"]["not_run"] == [] and found["stages"]["tests"]["not_run"] == 0
    assert found["stages"]["tests"]["counts"] == {"passed": 5, "failed": 3}
    failed = found["stages"]["tests"]["failures"]
    assert all(any(f"[{what}]" in line for line in failed) for what in ("crashes", "hangs", "fails"))
    assert "Timeout (0:00:15)" in output.with_suffix(".log").read_text()
    assert not any("cuda" in name for name in found["tests"])
    assert "left out: triton: headline tiny step: ours-triton: " in ended.stdout


DOCUMENTED = re.findall(r"python bench/gpu.py (--output .*)", (ROOT / "bench" / "README.md").read_text())
# Of planted processes; the three of check are one after another here.
SECONDS = dict(env=8, check=8, headline=120, peers=140, pytest=400, sampling=70, trainer=80) | {"setup.py": 5}


class Planted:
    """A process that takes as long as its command says, or for ever, on a clock that nothing else moves."""

    now, hanging = 0.0, ()

    def __init__(self, command, stdout, **_):
        self.pid, self.returncode = 2**30, 0
        self.left_s = next((s for word, s in SECONDS.items() if word in command), 0)
        self.left_s = math.inf if any(word in command for word in self.hanging) else self.left_s
        if "nvidia-smi" in command:
            self.command, _ = command, os.write(stdout.fileno(), b"1755, 2619, [N/A], 40\n1980, 2619, [N/A], 60\n198")

    def wait(self, timeout=0.0):
        took = max(0.0, min(self.left_s, timeout))
        Planted.now, self.left_s = Planted.now + took, self.left_s - took
        if self.left_s > 0:
            raise subprocess.TimeoutExpired("a planted process", timeout)

    def kill(self):
        assert "--id=0" in self.command


@pytest.mark.parametrize("hanging", [(), ("setup.py",), tuple(SECONDS)])
def test_every_stage_of_the_documented_calls_has_its_share_of_the_time(monkeypatch, tmp_path, hanging):
    monkeypatch.setattr(Planted, "now", 0.0)
    monkeypatch.setattr(Planted, "hanging", hanging)
    clock = types.SimpleNamespace(monotonic=lambda: Planted.now, strftime=lambda *_: "", gmtime=lambda: None)
    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(gpu.subprocess, "Popen", Planted)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name)
    assert len(DOCUMENTED) == 2
    for call in DOCUMENTED:
        arguments, begin = re.sub(r"--(output|peers) \S+", "", call).split(), Planted.now
        minutes = float(arguments[arguments.index("--minutes") + 1])
        gpu.main(["--output", str(tmp_path / "gpu.json"), *arguments])
        found = json.loads((tmp_path / "gpu.json").read_text())
        stages, all_hang = found["stages"], "env" in hanging
        names = arguments[arguments.index("--stages") + 1 :]
        assert Planted.now - begin <= 60 * minutes + 1e-6
        for name in names:
            share_s = 60 * minutes * gpu.SHARES[name] / sum(gpu.SHARES[other] for other in names)
            took_s, is_cut = stages[name]["seconds"], gpu.IS_OVER in str(stages[name].get("failures"))
            assert is_cut == (all_hang or name == "tests"), stages[name]
            assert abs(took_s - share_s) < 0.1 if all_hang else took_s > min(share_s, SECONDS.get(name, 0)) - 0.1, name
        assert bool(found["left_out"]) == all_hang, "a build that hangs leaves time to ask for backends"
        assert stages["build"]["clocks"]["sm_mhz"] == [1755, 1867.5, 1980]


@pytest.mark.parametrize("stage", ["headline", "peers"])
def test_the_rehearsal_of_a_stage_has_what_its_set_has(stage):
    name, rounds, (_, *against) = gpu.BENCHES[stage]
    assert rounds == 15 and all(
        set(select(job.against)) == {"ours", "floor", *select(against)} for job in SETS[name]["cuda"]
    )


def packed_peers(folder: Path, content: str) -> list[Path]:
    """As `make gpu-peers` writes them: a module that a .pth file leads to, in parts."""
    packages = folder.with_name("packages")
    (packages / "wheel" / "deeper").mkdir(parents=True, exist_ok=True)
    (packages / "wheel.pth").write_text("wheel/deeper\n")
    (packages / "wheel" / "deeper" / "a_peer.py").write_text(content)
    with tarfile.open(folder.with_suffix(".xz"), "w:xz") as archive:
        archive.add(packages, ".")
    whole = folder.with_suffix(".xz").read_bytes()
    parts = [folder / f"part-{i:02}" for i in range(3)]
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(parts):
        part.write_bytes(whole[i * len(whole) // 3 : (i + 1) * len(whole) // 3])
    sums = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return parts


def test_peers_are_unpacked_when_all_parts_are_there_and_python_finds_them(tmp_path):
    folder, target = tmp_path / "parts", tmp_path / "site-packages"
    assert gpu.unpack(folder, target) == ["SHA256SUMS"]
    _, second, third = packed_peers(folder, "value = 1")
    third.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    assert gpu.unpack(folder, target) == ["part-01", "part-02"] and not target.exists()
    for value in (1, 2):  # the second replaces the first
        packed_peers(folder, f"value = {value}")
        assert gpu.unpack(folder, target) == []
        command = [sys.executable, "-c", "import a_peer; print(a_peer.value)"]
        environment = os.environ | {"PYTHONPATH": str(target)}
        assert subprocess.check_output(command, env=environment, text=True) == f"{value}\n"
    (target / "added").touch()
    assert gpu.unpack(folder, target) == [] and (target / "added").exists()  # nothing to do
