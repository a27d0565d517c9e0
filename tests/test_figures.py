"""Numbers in the documents: each is that of a file of results, and each file says of which code it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from grpo_kernels.commands.bench import machine

PYTHON = '"""A module."""\n\n\ndef half(x):\n    """Halves it."""\n    return x / 2  # exactly\n'
CXX = 'int half(int x) { return x / 2; } // exactly\nconst char* url = "http://a";\n'


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for folder in machine.MEASURED:
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "csrc/half.h").write_text(CXX)
    (tmp_path / "grpo_kernels/head/half.py").write_text(PYTHON)
    (tmp_path / "grpo_kernels/kernels/launch.json").write_text('{"rows": 4, "warps": 8}')
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("grpo_kernels/head/half.py", "Halves it", "The half", False),
        ("grpo_kernels/head/half.py", "x / 2  # exactly", "(\n        x / 2\n    )", False),
        ("grpo_kernels/head/half.py", "x / 2", "x / 3", True),
        ("csrc/half.h", "{ return x / 2; } // exactly", "{\n  return x/2;  /* half */\n}", False),
        ("csrc/half.h", "http://a", "http://b", True),
        ("csrc/half.h", "return x", "returnx", True),
        ("grpo_kernels/kernels/launch.json", '"rows": 4, "warps": 8', '"warps":8,\n"rows": 4', False),
        ("grpo_kernels/kernels/launch.json", "8", "4", True),
    ],
)
def test_the_digest_is_of_code_and_not_of_its_text(code, file, old, new, changes):
    before, text = machine.code_digest(code), (code / file).read_text()
    assert old in text
    (code / file).write_text(text.replace(old, new))
    assert (machine.code_digest(code) != before) == changes


def test_results_say_of_which_code_they_are(tmp_path):
    here = machine.code(machine.ROOT)
    assert here["digest"] == machine.code_digest(machine.ROOT) and len(here["digest"]) == 16
    copied = machine.code(tmp_path)  # without sources and git, as it is installed
    assert [copied[name] for name in ("revision", "clean", "digest")] == [None] * 3
    for command in ("init -q", "-c user.name=a -c user.email=b commit -q --allow-empty -m c"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    copied = machine.code(tmp_path)
    assert len(copied["revision"]) == 12 and copied["clean"]
    (tmp_path / "new").touch()
    subprocess.run(["git", "add", "new"], cwd=tmp_path, check=True)
    assert machine.code(tmp_path)["clean"] is False
