"""The commands of the documents and of --help are ones that there are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import chat_models
import pytest
from accelerate.state import AcceleratorState

from grpo_kernels.commands.cli import main, make_parser
from grpo_kernels.trainer import evaluate
from grpo_kernels.trainer.arguments import make_parser as make_train_parser

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- the commands of the documents ------------------------------------------------------------------------------------

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "grpo_kernels/trainer/README.md", "grpo_kernels/integrations/README.md",
             "bench/README.md")  # fmt: skip
PROGRAMS = ("make", "python", "pip", "grpo-kernels", "torchrun", "accelerate", "echo")
PLACEHOLDERS = {"H": "64", "V": "100", "X": "2.15.0", "NAME": "sapo", "OUTPUT": "runs/first", "...": "", "N": "4"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def commands(name: str) -> list[list[str]]:
    """Of a document: lines of blocks without a language, indented lines, and code within a paragraph, as words."""
    text = read(name)
    blocks = re.findall(r"^ *```\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    found = []
    for line in lines:
        if not re.match(rf"\s*(\w+=\S+ )*({'|'.join(PROGRAMS)}) [\w.\"'-]", line):
            continue
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
        while re.match(r"\w+=", words[0]):
            words.pop(0)
        found.append([word for word in words if word])
    return found


def all_commands(program: str) -> list[tuple[str, list[str]]]:
    return [(name, words) for name in DOCUMENTS for words in commands(name) if words[0] == program]


def run(*words: str, status: int = 0) -> str:
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == status, (words, done.stderr)
    return done.stdout + done.stderr


def test_make_has_every_target_and_every_file_of_its_arguments():
    targets = re.findall(r"^([\w-]+):.* ## ", read("Makefile"), re.MULTILINE)
    targets += [target for _, words in all_commands("make") for target in words[1:2]]
    assert {"test", "demo", "gpu-report", "wheels"} < set(targets)
    run("make", "-n", *sorted(set(targets) - {"bench"}))  # which calls make
    for name, words in all_commands("make"):
        files = re.findall(r"[\w./-]+\.py", " ".join(words[2:]))
        assert all((ROOT / file).exists() for file in files), (name, words)


def test_scripts_have_the_options_that_documents_give_them():
    scripts = set()
    for name, words in all_commands("python"):
        module = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
        script = words[3] if module == "pytest.py" else module
        path = ROOT / script / "conftest.py" if (ROOT / script).is_dir() else ROOT / script
        given = {word for word in words if word.startswith("--")}
        if script != "setup.py":  # whose options are those of setuptools
            text = path.read_text(encoding="utf-8")
            assert all(f'"{option}"' in text for option in given), (name, words)
        scripts.add(script)
    assert {"bench", "bench/gpu.py"} < scripts


def test_pip_is_asked_for_extras_that_there_are():
    extras = set(re.findall(r"^([\w-]+) = \[", read("pyproject.toml"), flags=re.MULTILINE))
    for name, words in all_commands("pip"):
        named = {extra for word in words for part in re.findall(r"\[(.*)\]", word) for extra in part.split(",")}
        assert named <= extras, (name, words)


def test_every_command_of_the_package_parses():
    parsers = {"train": make_train_parser("train"), "demo": make_train_parser("demo"), "evaluate": evaluate.parser()}
    launched = [
        words[words.index("grpo_kernels") :] for p in ("torchrun", "accelerate") for _, words in all_commands(p)
    ]
    assert len(launched) == 2
    for words in [*launched, *(words for _, words in all_commands("grpo-kernels"))]:
        arguments, rest = make_parser().parse_known_args(words[1:])
        if hasattr(arguments, "command") and arguments.command in parsers and rest not in (["--help"], []):
            parsers[arguments.command].parse_args(rest)
        elif not hasattr(arguments, "command"):
            assert not rest, words
    shown = make_parser().format_help()
    for name in re.findall(r"^    (\w+)  ", shown, flags=re.MULTILINE):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0


@pytest.mark.parametrize("name", ["README.md", "grpo_kernels/trainer/README.md"])
def test_the_runs_of_the_documents_start_with_the_files_of_the_documents(name, tmp_path, monkeypatch, capsys):
    """Each `train` command as a dry run, with a tiny chat model for the one of the hub, in a folder where the commands
    and blocks of the document have made the files."""
    monkeypatch.chdir(tmp_path)
    files = re.findall(r"\*\*, `([\w.]+\.\w+)`.*?```\w+\n(.*?)\n *```", read(name), flags=re.DOTALL)
    for file, block in files:
        Path(file).write_text(textwrap.dedent(block) + "\n")
    model = chat_models.tiny_chat(tmp_path / "model")
    runs = 0
    for words in commands(name):
        if words[0] == "echo":
            assert words[2] == ">"
            Path(words[3]).write_text(words[1] + "\n")
        if words[:2] == ["grpo-kernels", "train"] and "--model-name-or-path" in words:
            words[words.index("--model-name-or-path") + 1] = str(model)
            AcceleratorState._reset_state(reset_partial_state=True)
            small = ["--num-generations", "2", "--per-device-train-batch-size", "2", "--max-completion-length", "2"]
            assert main([*words[1:], *small, "--dry-run", "--use-cpu"]) == 0, capsys.readouterr().err
            runs += 1
    assert runs
