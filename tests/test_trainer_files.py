"""Files and folders of a run: whole at any moment, whenever a process is killed, and written through no link."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys

import pytest
import training

from grpo_kernels.trainer import RunError, files
from grpo_kernels.trainer.checkpoint import find_checkpoint
from grpo_kernels.trainer.ranks import Interrupted
from grpo_kernels.trainer.report import run as report

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")  # of Python's audit


def killed_at(number, action):
    """Run `action` in a process that ends at this system call on files; whether it came to that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    calls = iter(range(number, -1, -1))

    def count(event="", arguments=()):
        if event in ("", *EVENTS) and next(calls, None) == 0:
            os._exit(9)

    def counted(call):
        return lambda *given: (count(), call(*given))[1]

    sys.addaudithook(count)
    os.fsync, os.write = counted(os.fsync), counted(os.write)
    try:
        action()
    finally:
        os._exit(0)


def remains(folder):
    return [path.name for path in folder.iterdir() if files.TEMPORARY.fullmatch(path.name)]


@pytest.fixture(scope="module")
def checkpoint(model, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("files") / "run"
    assert training.run(model, data, output, max_steps=1) == 0
    return output / "checkpoint-1"


@pytest.mark.parametrize("earlier", [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(earlier, checkpoint, tmp_path):
    """Written a second time, or for the first; and where the process that puts it in order is killed as well."""

    def fill(folder):
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        (folder / files.CHECKSUMS).unlink()
        (folder / "part").mkdir()
        (folder / "part" / "note").write_text("second")

    at, ended, found = 0, False, set()
    while not ended:
        output = tmp_path / str(at)
        output.mkdir()
        if earlier:
            shutil.copytree(checkpoint, output / "checkpoint-1")
        ended = not killed_at(at, lambda output=output: files.write_atomically(output / "checkpoint-1", fill))
        again = 0
        while killed_at(again, lambda output=output: files.remove_leftovers(output)):
            again += 1
        assert not remains(output), at
        sound = find_checkpoint(output, "auto")
        assert sound == output / "checkpoint-1" or not (earlier or ended or list(output.iterdir())), at
        if sound:
            found.add((sound / "part").exists())
        at += 1
        shutil.rmtree(output)
    assert at > 30 and found == {not earlier, True}


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    path, at = tmp_path / "config.json", 0
    path.write_text("first")
    while killed_at(at, lambda: files.write_text(path, "second")):
        assert path.read_text() in ("first", "second")
        at += 1
    files.remove_leftovers(tmp_path)
    assert at >= 4 and path.read_text() == "second" and os.listdir(tmp_path) == ["config.json"]


def test_a_checkpoint_that_is_pruned_loses_its_name_first(checkpoint, tmp_path):
    at, path, killed = 0, tmp_path / "checkpoint-1", True
    while killed:
        shutil.copytree(checkpoint, path, dirs_exist_ok=True)
        killed = killed_at(at, lambda: files.discard(path))
        assert not path.exists() or find_checkpoint(tmp_path, "auto") == path
        at += 1
    assert at > 5


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, Interrupted])
def test_19_a_folder_is_replaced_whole_or_not_at_all(error, tmp_path):
    """Where an interrupt comes while it is written."""

    def fill(folder):
        (folder / "new").write_text("")
        if error:
            raise error

    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "old").write_text("")
    with pytest.raises(error) if error else contextlib.nullcontext():
        files.write_atomically(tmp_path / "checkpoint-1", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    found = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert found == ({"old"} if error else {"new", "checksums.json"})


def test_a_folder_that_cannot_get_its_name_leaves_the_earlier_one(tmp_path, monkeypatch):
    replace, path = os.replace, tmp_path / "model"

    def fails(source, target):
        if str(source).endswith(files.DRAFT) and str(target).endswith("model"):
            raise OSError(5, "Input/output error")
        return replace(source, target)

    path.mkdir()
    (path / "old").write_text("")
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(RunError, match=r"model could not be written: .*Input/output error"):
        files.write_atomically(path, lambda folder: None)
    assert os.listdir(tmp_path) == ["model"] and os.listdir(path) == ["old"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_name_that_somebody_has_prepared_is_written_to(link, tmp_path, monkeypatch):
    """A name that is known beforehand can be a link already."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for target in ("config.json", "log.jsonl"):
        (tmp_path / target).symlink_to(mine)
    monkeypatch.setattr(files, "_temporary", lambda path, kind: tmp_path / "known")
    link(mine, tmp_path / "known")
    for write in (files.write_text, files.append):
        with pytest.raises(RunError):
            write(tmp_path / "log.jsonl", "theirs")
    monkeypatch.undo()
    files.write_text(tmp_path / "config.json", "theirs")
    assert mine.read_text() == "mine" and not (tmp_path / "config.json").is_symlink()


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "samples.jsonl", "summary.json", "report.html"])
def test_a_report_of_a_folder_with_links(name, tmp_path, capsys):
    """What a link leads to is neither shown nor written to; a pipe is not waited for."""
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_text('{"step": 1, "secret": 1}\n')
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for make in (lambda path: path.symlink_to(mine), os.mkfifo):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        assert report([str(folder)]) == (0 if name == "report.html" else 2)
        said = capsys.readouterr().err
        assert name == "report.html" or "is a link; expected a file" in said or "is a device or a pipe" in said
    assert mine.read_text() == '{"step": 1, "secret": 1}\n'


@pytest.mark.parametrize(("name", "words"), [
    ("config.json", "holds another run"), ("log.jsonl", "holds another run"), ("summary.json", "holds another run"),
])  # fmt: skip
def test_a_run_in_a_folder_with_links(name, words, model, data, tmp_path, capfd):
    """A link to nowhere is one that a run would have made a file of."""
    nowhere, output = tmp_path / "nowhere", tmp_path / "run"
    output.mkdir()
    (output / name).symlink_to(nowhere)
    assert training.run(model, data, output) == 2
    assert words in capfd.readouterr().err and not nowhere.exists()


@pytest.mark.parametrize("name", ["checksums.json", "run.json", "state.pt", "model.safetensors", "part/note"])
def test_a_checkpoint_with_links_or_damage(name, checkpoint, tmp_path, capsys):
    """In a folder within it as well: a tokenizer with several chat templates writes one."""

    def fill(folder):
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        (folder / files.CHECKSUMS).unlink()
        (folder / "part").mkdir()
        (folder / "part" / "note").write_text("second")

    newest = tmp_path / "checkpoint-2"
    files.write_atomically(newest, fill)
    assert find_checkpoint(tmp_path, "auto") == newest
    content = (newest / name).read_bytes()
    (newest / name).rename(tmp_path / "elsewhere")
    (newest / name).symlink_to(tmp_path / "elsewhere")
    assert find_checkpoint(tmp_path, "auto") is None and "is a link; expected a file" in capsys.readouterr().err
    (newest / name).unlink()
    if name == "checksums.json":
        return
    assert find_checkpoint(tmp_path, "auto") is None
    assert f"it has lost {name}" in capsys.readouterr().err
    (newest / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert find_checkpoint(tmp_path, "auto") is None
    assert f"{name} is damaged: its checksum differs" in capsys.readouterr().err
