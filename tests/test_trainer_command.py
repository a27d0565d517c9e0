"""The command line of the trainer and its files of options: what is read, what is shown, what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest

from grpo_kernels import __version__
from grpo_kernels.commands.cli import main
from grpo_kernels.trainer.arguments import TrainArguments, parse


def test_the_command_line_and_yaml(tmp_path, capsys):
    path = tmp_path / "options.yaml"
    path.write_text("learning-rate: 2e-5\nmax_steps: 7\nmodel_name_or_path: m\ndataset_name: d\nbf16: true\n"
                    "loss_options: {log_ratio_clamp: 20.0}\nreward_funcs: [a, b:c]\n")  # fmt: skip
    found = parse(["--config", str(path), "--max-steps", "9", "--top_p", "0.5"])
    assert (found.learning_rate, found.max_steps, found.bf16, found.top_p) == (2e-5, 9, True, 0.5)
    assert found.reward_funcs == ["a", "b:c"] and found.loss_options == {"log_ratio_clamp": 20.0}
    assert found.num_iterations == 1  # the arithmetic task's own defaults are for that task
    assert parse([]).reward_funcs == ["arithmetic"] and TrainArguments().reward_funcs == []
    path.write_text("reward_funcs: a\nbeta: null\nreward_weights: [1e-1, -1e-3]\nfsdp: false\n")
    found = parse(["--config", str(path)])
    assert (found.reward_funcs, found.reward_weights, found.fsdp) == (["a"], [0.1, -1e-3], False)
    assert found.beta == 0.005  # as if it were not there
    assert parse(["--reward-weights", "1e-3", "-1e-3", "-.5"]).reward_weights == [1e-3, -1e-3, -0.5]
    assert parse(["--bf16", "--use_cpu", "True"]).use_cpu and not parse(["--bf16=false"]).bf16
    wrong = ["--max-step", "1", "--delta", "1", "--no-such-option"]
    guesses = "--max-step (did you mean --max-steps?) 1 --delta 1 --no-such-option\n"
    for words, message in (
        (wrong, guesses),
        (["--reward-timeout", "9"], "--reward-timeout (this option was removed: a function that may hang sets"),
        (["--bf16=maybe"], "--bf16: invalid boolean value: 'maybe'"),
        (["--loss-options={"], "--loss-options: invalid json_object value: '{'"),
        (["--loss-options=3"], "--loss-options: invalid json_object value: '3'"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["train", *words])
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 2  # not a list of all options before what is wrong


@pytest.mark.parametrize(("text", "expected"), [
    ("optim_args: {eps: 1e-8, betas: [.9, 9E-1]}", {"optim_args": {"eps": 1e-8, "betas": [0.9, 0.9]}}),
    ("step_delimiter: '---'", {"step_delimiter": "---"}), ("reward_funcs: ['-x', 7]", {"reward_funcs": ["-x", "7"]}),
    ("output_dir: 2020-01-01", {"output_dir": "2020-01-01"}), ("dataset_config: no", {"dataset_config": "no"}),
    ("system_prompt: '--help'", {"system_prompt": "--help"}), ("bf16: yes\nseed: ~", {"bf16": True, "seed": 0}),
    ("seed: [1, 2]", "seed=[1, 2] is a list; expected int"), ("bf16: 1", "bf16=1 is a int; expected bool"),
    ("reward_weights: {a: 1}", "expected list[float]"), ("seed: 1\nseed: 2", "seed is there twice"),
    ("max_steps: 1\nmax-steps: 2", "max_steps is there twice"),
    ("version: 1", "'version' is no option"), ("help: true", "'help' is no option"),
    ("model: x", "'model' is no option"),
    ("config: /other.yaml", "'config' is no option"), ("1: 2", "'1' is no option"), ("~: 2", "'~' is no option"),
    ("[1]: 2", "is no option"), ("max_step: 2", "'max_step' is no option of a run (did you mean --max-steps?)"),
    ("seed: !!python/object/apply:os.getpid []", "could not determine a constructor"),
    ("[1, 2]", "it holds no options"), ("", "it holds no options"), ("seed: " + "[" * 5000, "expected options"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_values_of_yaml_are_those_of_options(text, expected, tmp_path):
    """Whatever they look like on a command line."""
    path = tmp_path / "options.yaml"
    path.write_text(f"{text}\n")
    if isinstance(expected, dict):
        found = parse(["--config", str(path)])
        assert {name: getattr(found, name) for name in expected} == expected
        return
    with pytest.raises((ValueError, TypeError), match=re.escape(expected)):
        parse(["--config", str(path)]).check_values()


def test_a_file_of_options_is_over_the_presets_of_a_demo(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("output_dir: mine\n")
    found = parse(["--config", str(path), "--seed", "3"], "demo", ["--output-dir=preset", "--seed=2", "--max-steps=5"])
    assert (found.output_dir, found.seed, found.max_steps) == ("mine", 3, 5)


def test_help_has_groups_choices_and_every_option_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")

    def shown(*words):
        with pytest.raises(SystemExit):
            main([*words])
        return capsys.readouterr().out

    for command, defaults in {"train": ("grpo-run", "1e-06", "500"), "demo": ("grpo-demo", "0.0002", "400")}.items():
        text = shown(command, "--help").replace("  --model {arithmetic,smollm2}", "").replace("  --task {", "")
        assert text.startswith(f"usage: grpo-kernels {command} [options]\n")
        for name, default in zip(("output-dir X", "learning-rate R", "max-steps N"), defaults, strict=True):
            assert re.search(rf"--{name} .*\(default: {default}\)", text), (command, name)
    groups = re.findall(r"^([\w ]+):$", text, flags=re.MULTILINE)
    assert {"model", "data", "sampling", "loss", "optimisation", "evaluation and saving"} < set(groups)
    options = re.findall(r"^  --([a-z][\w-]*)", text, flags=re.MULTILINE)
    names = [field.name.replace("_", "-") for field in dataclasses.fields(TrainArguments)]
    assert sorted(options) == sorted([*names, "config", "version"])
    for words in ("--loss {fused,eager}", "--dtype {float32,bfloat16}", "--loss-type {", "{linear,cosine,",
                  "--bf16 [true] autocast to bfloat16"):  # fmt: skip
        assert words in " ".join(text.split()), words
    assert shown("--version") == shown("train", "--version") == f"grpo-kernels {__version__}\n"


@pytest.mark.parametrize("name", ["train", "demo", "evaluate"])
def test_a_missing_package_is_one_sentence(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert main([name]) == 1
    assert capsys.readouterr().err == f"grpo-kernels {name} needs accelerate: pip install accelerate\n"


def test_report_names_what_is_wrong(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2 and not list(tmp_path.iterdir())
    assert "holds neither config.json nor log.jsonl" in capsys.readouterr().err
