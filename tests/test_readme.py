"""The documents: their Python runs, their tables are complete, their links lead somewhere, their commands are there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_models import tiny_chat

import grpo_kernels as gk
from grpo_kernels.commands.cli import main, make_parser
from grpo_kernels.config import AGGREGATIONS, KL_ESTIMATORS, SURROGATE_RULES
from grpo_kernels.objective.sequences import LEVELS
from grpo_kernels.trainer import evaluate
from grpo_kernels.trainer.arguments import make_parser as make_train_parser

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


README, GUIDE, VARIANTS = read("README.md"), read("grpo_kernels/README.md"), read("VARIANTS.md")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run_blocks(blocks: list[str], names: dict[str, Any]) -> None:
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_python_blocks_of_the_front_page_run_one_after_another(monkeypatch):
    """With what `pip install .` brings; the eager loss and ours agree, for ratios away from 1 too."""
    for package in ("transformers", "trl", "peft", "accelerate", "numpy"):
        monkeypatch.setitem(sys.modules, package, None)  # its import fails
    names: dict[str, Any] = {}
    _, batch, eager, fused, _ = python_blocks(README)
    run_blocks([batch, eager, fused], names)
    names["old_logps"] = names["old_logps"] + 0.2 * torch.randn(8, 10)
    found = []
    for block in (eager, fused):
        parameters = [*names["body"].parameters(), *names["lm_head"].parameters()]
        for p in parameters:
            p.grad = None
        run_blocks([block], names)
        found.append([p.grad.clone() for p in parameters])
    for ours, expected in zip(*found[::-1], strict=True):
        assert expected.any() and torch.allclose(ours, expected, atol=1e-6)


def test_the_trl_script_of_the_front_page_runs(tmp_path, monkeypatch):
    """One step on the CPU, with a tiny model and a local file in place of names."""
    pytest.importorskip("trl", reason="trl is not installed: run make test")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    script = python_blocks(README)[0]
    assert len(script.splitlines()) <= 15
    for shown, small in (
        ("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_chat(tmp_path / "model"))),
        ('"trl-lib/tldr"', f'"json", data_files={str(tmp_path / "rows.jsonl")!r}'),
        ("max_steps=100", "max_steps=1, max_completion_length=4, use_cpu=True, report_to=[]"),
    ):
        assert script.count(shown) == 1
        script = script.replace(shown, small)
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    names: dict[str, Any] = {}
    run_blocks([script], names)
    assert names["trainer"].state.global_step == 1


def test_python_blocks_of_the_guide_run_one_after_another():
    run_blocks(python_blocks(GUIDE), {})


def test_the_python_block_of_the_trainer_runs(tmp_path, monkeypatch):
    (block,) = (x for x in python_blocks(read("grpo_kernels/trainer/README.md")) if "train(" in x)
    folder = tiny_chat(tmp_path / "model")
    for shown, small in (("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder)), ("max_steps=200", "max_steps=1")):
        assert shown in block
        block = block.replace(shown, small)
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert json.loads(Path("runs/python/summary.json").read_text())["steps"] == 1


def test_the_python_blocks_of_the_integrations_run(tmp_path, monkeypatch):
    """With a small model in the place of the hub's, and for two steps."""
    for_trl, for_others = python_blocks(read("grpo_kernels/integrations/README.md"))
    small = "max_steps=2, use_cpu=True, num_generations=2, per_device_train_batch_size=2, "
    changes = ("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny_chat(tmp_path / "model"))), ("max_steps=20, ", small)
    for shown, instead in (*changes, ("length=64", "length=4")):
        assert shown in for_trl
        for_trl = for_trl.replace(shown, instead)
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    names: dict[str, Any] = {}
    run_blocks([for_trl, for_others], names)
    assert names["trainer"].state.global_step == 2
    given = [torch.randn(9, 8, requires_grad=True), torch.nn.Linear(8, 30, bias=False), torch.randint(30, (9,))]
    given += [torch.arange(9) < 6, SimpleNamespace(temperature=0.8, top_k=-1, top_p=0.9)]
    support = names["support_of_rollout"](*given)
    log_probs, entropy = names["log_probs_and_entropy"](*given, support)
    assert log_probs.requires_grad and entropy.requires_grad and (support.counts > 0).sum() == 6


def test_the_python_block_of_corrections_runs():
    names: dict[str, Any] = {}
    run_blocks(python_blocks(read("docs/corrections.md")), names)
    names["out"].loss.backward()
    assert names["hidden"].grad.any()


def test_the_python_block_of_teachers_trains_the_draft_head_alone():
    """Towards the policy's distribution of the same token, exactly."""
    names: dict[str, Any] = {}
    run_blocks(python_blocks(read("docs/teachers.md")), names)
    draft, hidden, weight = (names[name] for name in ("draft", "hidden", "weight"))
    assert hidden.grad is None and weight.grad is None
    q, p = ((x @ weight.T).log_softmax(-1) for x in (hidden[:, 1:].detach(), draft(hidden)[:, :-1]))
    expected = torch.autograd.grad((q.exp() * (q - p)).sum(-1).mean(), draft.weight)
    torch.testing.assert_close(draft.weight.grad, expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "trainers").glob("*.md")), ids=lambda page: page.stem)
def test_the_code_of_a_page_is_that_of_the_file_which_the_comment_above_it_names(page):
    fence = r"^(?:<!-- from (\S+) -->\n\n)?```(?:python|diff)\n(.*?)^```$"
    blocks = re.findall(fence, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for file, code in blocks:
        assert file and code.strip() and f"\n{code}" in f"\n{read(file)}", (file, code)


def test_further_blocks_of_an_item_begin_with_four_spaces():
    """Or a multiple of them: others end the list on the site, which Python-Markdown makes, and not on GitHub."""
    folders = (ROOT / name for name in ("grpo_kernels", "docs", "bench", "examples"))
    for path in [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]:
        assert not re.findall(r"^\n(?: {4})* {1,3}\S.*", path.read_text(encoding="utf-8"), flags=re.MULTILINE), path


def test_the_guide_names_every_metric():
    inputs = dict.fromkeys(("old_logps", "ref_logps", "rollout_logps"), torch.zeros(2, 3) - 4)
    inputs |= {"rollout_weights": torch.ones(2), "rewards": torch.tensor([0.0, 1.0]), "num_generations": 2}
    inputs |= {"sampling_mask": gk.SamplingMask.from_lists([[{1, 2, 3}] * 3] * 2)}
    shown = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", GUIDE.split("## Metrics")[1].split("## When")[0]))
    for surrogate in ("clip", "cispo"):
        config = gk.GRPOConfig(surrogate=surrogate, epsilon_high=5.0, beta=0.1, entropy_coef=0.1)
        out = gk.fused_grpo_loss(
            torch.randn(2, 3, 8), torch.randn(50, 8), torch.ones(2, 3).long(), config=config, **inputs
        )
        assert out.metrics.keys() | out.groups.keys() - {"loss"} <= shown


def test_presets():
    table = VARIANTS.split("| preset |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(gk.available_presets())


@pytest.mark.parametrize("axis", [SURROGATE_RULES, LEVELS, KL_ESTIMATORS, AGGREGATIONS], ids=len)
def test_axes(axis):
    table = VARIANTS.split("| axis |")[1].split("\n\n")[0]
    missing = [name for name in axis if not re.search(rf"[ |(]{re.escape(name)}[ ,;|]", table)]
    assert not missing


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "VARIANTS.md", "grpo_kernels/README.md",
     "grpo_kernels/integrations/README.md", "examples/README.md"],
)  # fmt: skip
def test_links_and_files(name):
    text = read(name)
    targets = [(ROOT / name).parent / target for target in re.findall(r"\]\(([^)#:]+)[)#]", text)]
    targets += [ROOT / target for target in re.findall(r"`((?:grpo_kernels|csrc|tests|python|bench)/[\w./]*)`", text)]
    inside = re.findall(r"`((?:head|kernels|commands)/[\w./]*)`", text)
    targets += [ROOT / "grpo_kernels" / target for target in inside]
    assert targets and not [target for target in targets if not target.exists()]


def test_the_reference_has_every_public_name_and_integration():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    assert {f"grpo_kernels.{name}" for name in gk.__all__} <= shown
    inner = {"__init__", "trl_support"}  # the second is a part of trl.py
    modules = {path.stem for path in (ROOT / "grpo_kernels" / "integrations").glob("*.py")} - inner
    assert modules <= {name.split(".")[2] for name in shown if name.startswith("grpo_kernels.integrations.")}


def test_map_of_files():
    """ARCHITECTURE.md names every module outside the folders of many, and only files that exist."""
    section = read("ARCHITECTURE.md").split("**The map.**")[1].split("**Dependencies**")[0]
    named = set(re.findall(r"\b\w+\.py\b", section.split("csrc/")[0])) - {"__init__.py"}
    package = ROOT / "grpo_kernels"
    assert named <= {path.name for path in package.rglob("*.py")}
    for folder in (
        ".",
        "objective",
        "head",
        "kernels",
        "kernels/torch",
        "kernels/compiled",
        "integrations",
        "commands",
    ):
        modules = {path.name for path in (package / folder).glob("*.py")} - {"__init__.py", "__main__.py"}
        assert modules <= named, folder
    assert set(re.findall(r"\w+\.h\b", section)) <= {path.name for path in (ROOT / "csrc").rglob("*.h")}


def test_every_pitfall_of_the_trainers_table_has_its_test():
    rows = re.findall(r"^\| (\d+) \|.*\| (`test_.*`) \|$", read("grpo_kernels/trainer/README.md"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = {name for _, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert named <= set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))


# --- the commands of the documents ------------------------------------------------------------------------------------

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "grpo_kernels/trainer/README.md", "grpo_kernels/integrations/README.md",
             "bench/README.md", "SECURITY.md", ".github/ISSUE_TEMPLATE/bug.yml",
             ".github/pull_request_template.md")  # fmt: skip
PROGRAMS = ("make", "python", "pip", "grpo-kernels", "torchrun", "accelerate")
PLACEHOLDERS = {"H": "64", "V": "100", "X": "2.15.0", "NAME": "sapo", "OUTPUT": "runs/first", "...": "", "N": "4"}


def commands(name: str) -> list[list[str]]:
    """Of a document: lines of blocks without a language, indented lines, and code within a paragraph, as words."""
    text = read(name)
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fences if not language]
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


def test_make_has_every_target_and_every_file_of_its_arguments():
    targets = re.findall(r"^([\w-]+):.* ## ", read("Makefile"), re.MULTILINE)
    targets += [target for _, words in all_commands("make") for target in words[1:2]]
    assert {"test", "demo", "gpu-report", "wheels"} < set(targets)
    made = subprocess.run(["make", "-n", *sorted(set(targets) - {"bench"})], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr  # bench calls make
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
    assert len(launched) == 3
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
    """Each `train` command as a dry run, with a tiny chat model for the one that is named, in a folder where the blocks
    of the document have made the files."""
    monkeypatch.chdir(tmp_path)
    files = re.findall(r"\*\*, `([\w.]+\.\w+)`.*?```\w+\n(.*?)\n *```", read(name), flags=re.DOTALL)
    for file, block in files:
        Path(file).write_text(textwrap.dedent(block) + "\n")
    run_blocks([block for block in python_blocks(read(name)) if "open(" in block], {})
    model = tiny_chat(tmp_path / "model")
    runs = 0
    for words in commands(name):
        if words[:2] == ["grpo-kernels", "train"] and "--model-name-or-path" in words:
            words[words.index("--model-name-or-path") + 1] = str(model)
            AcceleratorState._reset_state(reset_partial_state=True)
            small = ["--num-generations", "2", "--per-device-train-batch-size", "2", "--max-completion-length", "2"]
            assert main([*words[1:], *small, "--dry-run", "--use-cpu"]) == 0, capsys.readouterr().err
            runs += 1
    assert runs
