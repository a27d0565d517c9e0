"""Files and folders that are whole or absent, whenever a process is killed, a disk is full or power is lost."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import RunError

CHECKSUMS = "checksums.json"  # of the files of a folder that `write_atomically` made
WRITTEN_BESIDE = r"\.(checkpoint-\d+|start-model-\d+|model|trial-\w+|(config|summary)\.json)\.(partial|replaced)"


def write_json(path: Path, value: Any) -> None:
    """Write a value of JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole at any moment, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with naming(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise RunError, with the name of the file, where a write within it fails (a full disk): its OSError has none."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}") from error


def write_atomically(folder: Path, fill: Callable[[Path], object]) -> None:
    """Make `folder` by filling a temporary one beside it, with checksums, synced to the disk before it is renamed.

    Raises RunError where that fails (a full disk); what was there before stays.
    """
    partial, replaced = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "replaced"))
    remove(partial)
    remove(replaced)
    try:
        partial.mkdir(parents=True)
        fill(partial)
        sums = {path.name: sha256(path) for path in sorted(partial.iterdir()) if path.is_file()}
        (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1))
        for path in (*partial.iterdir(), partial):
            sync(path)
        with suppress(FileNotFoundError):
            folder.replace(replaced)  # to remove it takes longer
        partial.replace(folder)
        sync(folder.parent)
        remove(replaced)
    except BaseException as error:
        remove(partial)
        if not isinstance(error, Exception):  # a second Ctrl-C
            raise
        # safetensors and torch have errors of their own for a full disk
        full = getattr(error, "errno", None) == errno.ENOSPC or any(
            words in str(error) for words in ("space left", "unexpected pos")
        )
        why = "the disk is full" if full else str(error)
        raise RunError(f"{folder} could not be written: {why}; earlier checkpoints are unchanged") from error


def remove_leftovers(output: Path) -> None:
    """Remove what a process that was killed while it wrote has left."""
    for path in output.iterdir():
        if re.fullmatch(WRITTEN_BESIDE, path.name):
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder with what it holds, a file, or a link and not what it leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def lock_folder(folder: Path) -> int:
    """A handle of the folder, which no second run gets while this one has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir={folder} cannot be made: {error.strerror}") from error
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"output_dir={folder} is in use by another run; expected a folder for each run") from None
    except OSError:  # a file system without locks
        pass
    return handle


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file or a folder on the disk, as it is now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)
