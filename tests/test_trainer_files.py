"""Files and folders of a run: whole at any moment, whenever a process is killed, and written through no link."""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil

import pytest
import training

from grpo_kernels.trainer import RunError, files
from grpo_kernels.trainer.checkpoint import find_checkpoint
from grpo_kernels.trainer.ranks import Interrupted
from grpo_kernels.trainer.report import run as report

CALLS = [  # system calls on files, as Python makes them
    (builtins, "open"), (os, "open"), (os, "mkdir"), (os, "write"), (os, "fsync"), (os, "truncate"), (os, "rename"),
    (os, "replace"), (os, "remove"), (os, "unlink"), (os, "rmdir"),
]  # fmt: skip


def states(folder, action):
    """Copies of a folder as a kill before each system call on files of `action` leaves it, and as it is in the end;
    one of states that are the same."""
    copies, last, copying = [], None, False

    def copy():
        nonlocal last, copying
        status = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
        now = [(path, of.st_ino, of.st_size, of.st_mtime_ns) for path, of in status]
        if not copying and now != last:
            last, copying = now, True
            copies.append(shutil.copytree(folder, folder.with_name(f"{folder.name}-{len(copies)}"), symlinks=True))
            copying = False

    def watched(call):
        return lambda *given, **named: (copy(), call(*given, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, watched(getattr(module, name)))
        action()
    copy()
    return copies


def fill_from(checkpoint):
    """What fills a folder with the files of a checkpoint, and with one in a folder within it."""

    def fill(folder):
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        (folder / files.CHECKSUMS).unlink()
        (folder / "part").mkdir()
        (folder / "part" / "note").write_text("second")

    return fill


@pytest.fixture(scope="module")
def checkpoint(model, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("files") / "run"
    assert training.run(model, data, output, max_steps=1) == 0
    return output / "checkpoint-1"


@pytest.mark.parametrize("earlier", [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(earlier, checkpoint, tmp_path):
    """Written a second time, or for the first; and where the process that puts it in order is killed as well."""
    output, found = tmp_path / "run", set()
    output.mkdir()
    if earlier:
        shutil.copytree(checkpoint, output / "checkpoint-1")
    killed = states(output, lambda: files.write_atomically(output / "checkpoint-1", fill_from(checkpoint)))
    for state in killed:
        for again in states(state, lambda state=state: files.remove_leftovers(state)):
            files.remove_leftovers(again)
            assert not any(files.TEMPORARY.fullmatch(path.name) for path in again.iterdir()), again
            sound = find_checkpoint(again, "auto")
            whole = again / "checkpoint-1"
            assert sound == whole or not (earlier or state == killed[-1] or list(again.iterdir())), again
            if sound:
                found.add((sound / "part").exists())
    assert len(killed) > 10 and found == {not earlier, True}


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("first")
    killed = states(folder, lambda: files.write_text(folder / "config.json", "second"))
    assert len(killed) == 3 and (killed[-1] / "config.json").read_text() == "second"
    for state in killed:
        assert (state / "config.json").read_text() in ("first", "second")
        files.remove_leftovers(state)
        assert os.listdir(state) == ["config.json"]


def test_a_checkpoint_that_is_pruned_loses_its_name_first(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "run" / "checkpoint-1")
    killed = states(tmp_path / "run", lambda: files.discard(tmp_path / "run" / "checkpoint-1"))
    assert len(killed) > 5
    for state in killed:
        path = state / "checkpoint-1"
        assert not path.exists() or find_checkpoint(state, "auto") == path


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
    newest = tmp_path / "checkpoint-2"
    files.write_atomically(newest, fill_from(checkpoint))
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
