"""Checkpoints of the trainer: the same bits after any interruption, and no harm from a bad one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import training
from ranks import START_METHOD
from safetensors.torch import load_file, save_file
from training import HARD, run, same_weights, steps

from grpo_kernels.trainer import RunError, files, sampling
from grpo_kernels.trainer.checkpoint import find_checkpoint
from grpo_kernels.trainer.loop import Trainer

SIX_STEPS = HARD | {"max_steps": 6, "save_steps": 1, "save_total_limit": 9}
RESUMED = SIX_STEPS | {"resume_from_checkpoint": "auto"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return training.make_data(tmp_path_factory.mktemp("data") / "problems.jsonl", rows=6)


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """A run of 6 steps that nothing interrupts, with a checkpoint after each."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert run(model, data, output, **SIX_STEPS) == 0
    return output


@pytest.fixture
def output(whole, tmp_path):
    """A copy of that run."""
    return shutil.copytree(whole, tmp_path / "run")


def resumed_after(step, model, data, output):
    """Continue a run as it was after `step`."""
    for folder in output.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    assert (output / f"checkpoint-{step}").is_dir()  # otherwise the run would begin again, and be equal
    shutil.rmtree(output / "model")
    torch.rand(7)  # pitfall 2: random numbers are streams of their own, whatever was drawn before
    return run(model, data, output, **RESUMED)


def without_times(output):
    times = ("seconds", "tokens_per_second", "warnings", "slowest_reward")
    return [{k: v for k, v in r.items() if not k.startswith(times)} for r in steps(output)]


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_pitfall_01_02_resuming_after_any_step_gives_the_same_bits(step, model, data, whole, output):
    """Steps 1 to 3 lie inside of a rollout, after step 4 it is used up, and an epoch ends inside of the next."""
    assert resumed_after(step, model, data, output) == 0
    assert same_weights(whole, output) and without_times(output) == without_times(whole)
    assert (whole / "samples.jsonl").read_text() == (output / "samples.jsonl").read_text()


def test_pitfall_02_the_test_of_random_numbers_can_fail(model, data, whole, output, monkeypatch):
    monkeypatch.setattr("grpo_kernels.trainer.rollout.set_seed", lambda seed: None)
    assert resumed_after(4, model, data, output) == 0
    assert not same_weights(whole, output)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(model, data, tmp_path, monkeypatch):
    """At a random moment of the steps after the fourth."""
    options = HARD | {"save_steps": 1, "save_total_limit": 2, "max_steps": 12}
    options["reward_funcs"] = "training:length_or_kill"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(model, data, whole, **options) == 0
    with monkeypatch.context() as patched:
        patched.setenv("KILL_AT", "4")
        process = get_context(START_METHOD).Process(target=run, args=(model, data, killed), kwargs=options)
        process.start()
        process.join(900)
    assert process.exitcode == -signal.SIGKILL
    assert run(model, data, killed, **options, resume_from_checkpoint="auto") == 0
    assert same_weights(whole, killed) and without_times(whole) == without_times(killed)
    assert not list(killed.glob(".*partial"))


@pytest.mark.parametrize(
    ("number", "status", "when"),
    [(signal.SIGTERM, 143, "update"), (signal.SIGINT, 130, "sampling")],
)
def test_a_signal_saves_and_leaves_with_a_status_of_its_own(number, status, when, model, data, whole, tmp_path,
                                                             monkeypatch):  # fmt: skip
    options = SIX_STEPS | {"save_steps": 0}
    owner, method, call = (Trainer, "_clip", 2) if when == "update" else (sampling, "draw", 3)
    original, calls = getattr(owner, method), []

    def interrupted(*given, **named):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            assert when == "update", "sampling goes on"
        return original(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr("grpo_kernels.trainer.run.check_sampler", lambda *given: None)  # which samples too
        patched.setattr(owner, method, interrupted)
        assert run(model, data, tmp_path / "run", **options) == status
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1 and not (tmp_path / "run" / "model").exists()
    assert run(model, data, tmp_path / "run", resume_from_checkpoint="auto", **options) == 0
    assert same_weights(whole, tmp_path / "run")


# --- pitfall 19 -------------------------------------------------------------------------------------------------------


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_pitfall_19_a_damaged_checkpoint_is_skipped_with_a_warning(model, data, whole, output, capfd):
    newest, earlier = output / "checkpoint-6", output / "checkpoint-5" / "state.pt"
    flip_a_bit(newest / "model.safetensors")
    before = earlier.read_bytes()
    assert run(model, data, output, **SIX_STEPS, resume_from_checkpoint=newest) == 2
    assert run(model, data, output, **RESUMED) == 0
    refused, skipped = re.findall("(.*)model.safetensors is damaged: its checksum differs", capfd.readouterr().err)
    assert refused.endswith(f"resume_from_checkpoint={newest}: ") and skipped == f"{newest} is skipped: "
    assert same_weights(whole, output) and earlier.read_bytes() == before


def test_19_pruning_keeps_what_can_be_resumed(model, data, output):
    """The newest folder is damaged: it must not outlive the sound ones that are written after it."""
    (output / "checkpoint-6" / "state.pt").unlink()
    (output / "checkpoint-6").rename(output / "checkpoint-60")
    assert run(model, data, output, **RESUMED | {"max_steps": 8, "save_total_limit": 1}) == 0
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-60"}


def rewritten(checkpoint, **files):
    """Write files of a checkpoint anew, by functions of their paths, with checksums that are right."""
    sums = json.loads((checkpoint / "checksums.json").read_text())
    for name, write in files.items():
        name = {"model": "model.safetensors", "state": "state.pt"}.get(name, name)
        write(checkpoint / name)
        if name in sums and (checkpoint / name).exists():
            sums[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    if "checksums.json" not in files:
        (checkpoint / "checksums.json").write_text(json.dumps(sums))


def changed_state(**fields):
    """Set fields of state.pt, or of the progress in it."""

    def write(path):
        state = torch.load(path)
        (state["progress"] if fields.keys() <= state["progress"].keys() else state).update(fields)
        torch.save(state, path)

    return write


WEIGHT = "lm.model.embed_tokens.weight"


def changed_number(*keys, value):
    """Set a number of state.pt, or of a safetensors file, to `value`."""

    def write(path):
        found = tensors = torch.load(path) if path.suffix == ".pt" else load_file(path)
        for key in keys:
            found = found[key]
        found.view(-1)[1] = value
        torch.save(tensors, path) if path.suffix == ".pt" else save_file(tensors, path, {"format": "pt"})

    return write


@pytest.mark.parametrize(("files", "words"), [
    ({"state": changed_state(step=5)}, "state.pt is not as a run writes it: ValueError: its schedule is at another"),
    ({"state": changed_state(step="6")}, "state.pt is not as a run writes it: ValueError: its schedule is at another"),
    ({"state": changed_state(progress={})}, "state.pt is not as a run writes it: TypeError"),
    ({"state": changed_state(rollout=[{"ids": 7}])}, "state.pt is not as a run writes it: TypeError"),
    ({"state": changed_state(optimizer=None)}, "state.pt is not as a run writes it: ValueError: its optimizer is that"),
    ({"state": changed_state(reference=[1])}, "AttributeError: "),
    ({"state": changed_number("optimizer", "state", WEIGHT, "exp_avg_sq", value=math.inf)},
     "state.pt has numbers that are not finite"),
    ({"state": changed_number("reference", WEIGHT, value=math.nan)}, "state.pt has numbers that are not finite"),
    ({"model": changed_number("lm_head.weight", value=math.nan)}, "model.safetensors has numbers that are not finite"),
    ({"model": changed_number("lm_head.weight", value=1e25)}, "model.safetensors has numbers that are not finite"),
    ({"model": lambda path: path.write_bytes(b"x" * 99)}, "SafetensorError: "),
    ({"state": lambda path: path.write_bytes(b"PK")}, "state.pt is not as a run writes it: "),
    ({"state": lambda path: torch.save(Path("x"), path)}, "state.pt is not as a run writes it: UnpicklingError"),
    ({"checksums.json": lambda path: os.truncate(path, path.stat().st_size // 2)}, "JSONDecodeError: "),
    ({"checksums.json": Path.unlink}, "it holds no checksums.json: it was not written by grpo-kernels train"),
    ({"model": Path.unlink}, "it has lost model.safetensors"),
])  # fmt: skip
def test_an_unsound_checkpoint_is_skipped_and_refused_by_name(files, words, output, capfd):
    """Whatever its checksums say: an earlier version has saved what is not finite."""
    newest = output / "checkpoint-6"
    rewritten(newest, **files)
    with pytest.raises(RunError, match=re.escape(f"resume_from_checkpoint={newest}: {words}")):
        find_checkpoint(output, str(newest))
    assert find_checkpoint(output, "auto") == output / "checkpoint-5"
    assert f"{newest} is skipped: {words}" in capfd.readouterr().err


@pytest.mark.parametrize("keys", [("optimizer", "state", WEIGHT, "exp_avg"), ("reference", WEIGHT)])
def test_a_state_of_another_model_is_a_sentence(keys, model, data, output, capfd):
    def shorter(path):
        tensors = torch.load(path)
        found = tensors
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = found[keys[-1]][:-1].clone()
        torch.save(tensors, path)

    rewritten(output / "checkpoint-6", **{"state.pt": shorter})
    assert run(model, data, output, **RESUMED | {"max_steps": 8}) == 1
    error = capfd.readouterr().err
    assert "checkpoint-6/state.pt does not fit the model: " in error and "Traceback" not in error


def set_moments(name, value):
    def harm(trainer):
        for state in trainer.run.optimizer.state.values():
            state[name].view(-1)[0] = value

    return harm


def set_weights(value):
    @torch.no_grad()
    def harm(trainer):
        for parameter in trainer.run.trained():
            parameter.fill_(value)

    return harm


@pytest.mark.parametrize(("step", "harm", "words"), [
    (4, set_moments("exp_avg", math.nan), "step 4 leaves weights whose norm is nan; the run ends here"),
    (4, set_moments("exp_avg_sq", math.inf),
     "after step 4 the norm of the optimizer's state is inf; the run ends here"),
    (6, set_weights(1e12), "after step 6 a log-probability under the policy is nan; the run ends here"),
    (4, lambda trainer: trainer.reference.pairs[WEIGHT][1].fill_(math.inf),
     "after step 4 the norm of the reference policy is inf; the run ends here"),
])  # fmt: skip
def test_a_step_that_breaks_the_run_is_not_saved(step, harm, words, model, data, whole, tmp_path, monkeypatch, capfd):
    """And the last sound checkpoint stays, from which the run goes on."""
    clip, output, options = Trainer._clip, tmp_path / "run", SIX_STEPS | {"save_total_limit": 1}

    def harmful(trainer):
        if trainer.progress.step == step - 1:
            harm(trainer)
        return clip(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_clip", harmful)
        assert run(model, data, output, **options) == 1
    error = capfd.readouterr().err
    assert f"grpo-kernels train: {words}, and its checkpoints are those of earlier steps" in error, error
    assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{step - 1}"]
    assert not (output / "model").exists() and not (output / "summary.json").exists()
    assert run(model, data, output, **options, resume_from_checkpoint="auto") == 0
    assert same_weights(whole, output)


def test_checkpoints_behind_links(model, data, whole, output, tmp_path, capfd):
    """On another disk, say. Pruning takes the link, and leaves what lies elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    (output / "checkpoint-6").rename(elsewhere)
    (output / "checkpoint-6").symlink_to(elsewhere)
    (output / "checkpoint-99").symlink_to(tmp_path / "nowhere")
    assert run(model, data, output, **RESUMED | {"max_steps": 7, "save_total_limit": 1}) == 0
    assert f"{output / 'checkpoint-99'} is skipped: there is no such folder" in capfd.readouterr().err
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-7", "checkpoint-99"}
    assert (elsewhere / "state.pt").exists() and not list(output.glob(".*"))
    (output / "checkpoint-99").unlink()
    latest = tmp_path / "latest"
    latest.symlink_to(output / "checkpoint-7")
    assert run(model, data, output, **SIX_STEPS | {"max_steps": 8, "resume_from_checkpoint": latest}) == 0


def test_other_prompts_are_refused(model, data, output, capfd):
    before = data.read_bytes()
    rows = before.splitlines()
    rows[3] = json.dumps(json.loads(rows[3]) | {"answer": "9"}).encode()
    try:
        data.write_bytes(b"\n".join(rows))
        assert run(model, data, output, **RESUMED) == 2
    finally:
        data.write_bytes(before)
    assert f"was written with other prompts: dataset_name={data} has changed since" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["model_name_or_path", "teacher_model_name_or_path"])
def test_another_model_under_the_same_path_is_refused(option, model, data, tmp_path, capfd):
    """The frozen one of an adapter, or a teacher, of which a checkpoint holds nothing. A single number is seen."""
    start = shutil.copytree(model, tmp_path / "start")
    options = {"max_steps": 1, option: start, "use_peft": option == "model_name_or_path"}
    assert run(model, data, tmp_path / "run", **options) == 0
    again = options | {"max_steps": 2, "resume_from_checkpoint": "auto"}
    save_file(tensors := load_file(start / "model.safetensors"), start / "model.safetensors", {"format": "pt"})
    assert run(model, data, tmp_path / "run", **again) == 0
    tensors["model.embed_tokens.weight"][3, 5] += 1
    save_file(tensors, start / "model.safetensors", {"format": "pt"})
    assert run(model, data, tmp_path / "run", **again | {"max_steps": 3}) == 2
    assert f"was written with another model: {option}={start} has changed since" in capfd.readouterr().err


@contextlib.contextmanager
def no_space_left(size):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "save", full)
        yield "the disk is full"


@contextlib.contextmanager
def small_files(size):
    """A write ends in the middle, by the system's own hand."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        yield "could not be written"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("disk", [no_space_left, small_files])
def test_pitfall_19_a_full_disk_keeps_what_was_there(disk, model, data, output, capfd):
    shutil.rmtree(output / "checkpoint-6")
    before = {path: path.read_bytes() for path in (output / "checkpoint-5").iterdir()}
    with disk((output / "checkpoint-5" / "model.safetensors").stat().st_size) as why:
        assert run(model, data, output, **RESUMED) == 1
    error = capfd.readouterr().err
    assert all(words in error for words in ("checkpoint-6 could not", why, "earlier checkpoints are unchanged"))
    assert {path: path.read_bytes() for path in before} == before
    assert not (output / "checkpoint-6").exists() and not list(output.glob(".*"))


@pytest.mark.parametrize("name", ["log.jsonl", "samples.jsonl", "config.json"])
def test_a_full_disk_names_the_file(name, model, data, tmp_path, monkeypatch, capfd):
    opened, file = files.open_file, tmp_path / "run" / name

    def open_file(path, mode):
        full = mode != "rb" and name in path.name and path.parent == file.parent
        if mode == "ab":
            path.touch()
        return open("/dev/full", "wb") if full else opened(path, mode)

    monkeypatch.setattr(files, "open_file", open_file)
    assert run(model, data, tmp_path / "run") == (2 if name == "config.json" else 1)
    assert f"grpo-kernels train: {file} could not be written: No space left on device\n" in capfd.readouterr().err


def test_pitfall_19_another_configuration_is_refused_by_name(model, data, whole, capfd):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert run(model, data, whole, **RESUMED | {"learning_rate": 5e-3, "loss_type": "grpo"}) == 2
    assert "learning_rate=0.005 (was 0.001), loss_type='grpo' (was 'dapo')" in capfd.readouterr().err
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}


def test_a_longer_run_goes_on_where_the_rate_does_not_depend_on_the_length(model, data, output, capfd):
    """Another number of threads is said. What a killed process left is removed, and no other hidden file."""
    rewritten(output / "checkpoint-6", state=changed_state(environment={"threads": 99}))
    unique = "0123456789abcdef"
    for name in (f".checkpoint-7.{unique}.partial", f".model.{unique}.partial", f".checkpoint-5.{unique}.replaced"):
        (output / name).mkdir()
    (output / "checkpoint-6").rename(output / f".checkpoint-6.{unique}.replaced")  # and has its name again
    (output / ".notes.partial").write_text("")
    assert run(model, data, output, **RESUMED | {"max_steps": 8, "save_steps": 0}) == 0
    assert [r["step"] for r in steps(output)] == list(range(1, 9))
    assert "was written with threads=99, now 1: results may differ" in capfd.readouterr().err
    assert [path.name for path in output.glob(".*")] == [".notes.partial"]


def test_a_run_whose_rate_depends_on_the_length_says_so(model, data, tmp_path, capfd):
    options = {"lr_scheduler_type": "linear", "max_steps": 2, "resume_from_checkpoint": "auto"}
    assert run(model, data, tmp_path, **options) == 0
    assert run(model, data, tmp_path, **options | {"max_steps": 4}) == 2
    error = capfd.readouterr().err
    begin = tmp_path / "checkpoint-2"
    assert "max_steps=4 (was 2); expected the same; max_steps too, unless the schedule is constant: " in error
    assert f"a new run may begin with model_name_or_path={begin}" in error
    assert run(model, data, tmp_path, **options, save_steps=7, logging_steps=1) == 0
    assert run(begin, data, tmp_path / "more", lr_scheduler_type="linear") == 0


@pytest.mark.parametrize(("name", "harm", "words"), [
    ("log.jsonl", lambda text: text[: len(text) // 2], "bytes shorter than at step 6"),
    ("log.jsonl", lambda text: text[:-99] + b"\0" * 99, "1 of {count} lines cannot be read"),
    ("samples.jsonl", lambda text: text[:-99] + b"\0" * 99, "1 of {count} lines cannot be read"),
], ids=["short", "zeros", "samples"])  # fmt: skip
def test_a_damaged_log_does_not_keep_a_run_from_going_on(name, harm, words, model, data, output, capfd):
    path = output / name
    path.write_bytes(harm(text := path.read_bytes()))
    assert run(model, data, output, **RESUMED | {"max_steps": 8}) == 0
    assert words.format(count=text.count(b"\n")) in capfd.readouterr().err
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert name == "samples.jsonl" or [record["step"] for record in records[-2:]] == [7, 8]
