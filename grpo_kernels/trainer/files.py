"""Files and folders that are whole or absent, whenever a process is killed, a disk is full or power is lost.

A folder of output may be another person's: what is written gets a new name first, and no link in it is followed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import RunError

CHECKSUMS = "checksums.json"  # of the files of a folder that `write_atomically` made
# What is not yet whole, or no longer needed; and a folder that another one is about to take the place of.
DRAFT, REPLACED = "partial", "replaced"
TEMPORARY = re.compile(rf"\.(.+)\.[0-9a-f]{{16}}\.({DRAFT}|{REPLACED})")


def write_json(path: Path, value: Any) -> None:
    """Writes a value of JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file that is whole at any moment, and makes its folder."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """Opens a new file, which takes the place of `path` when all of it is on the disk. Raises RunError where it cannot
    be written; what was there before stays."""
    draft = _temporary(path, DRAFT)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_file(draft, "xb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                draft.replace(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        sync(path.parent)


def append(path: Path, text: str) -> None:
    """Writes to the end of a file, and makes it."""
    with naming(path), open_file(path, "ab") as file:
        file.write(text.encode())


def read_file(path: Path) -> bytes:
    """Returns what a file holds; raises FileNotFoundError where there is none."""
    with open_file(path, "rb") as file:
        return file.read()


@contextmanager
def open_file(path: Path, mode: str) -> Iterator[Any]:
    """Opens a file by a binary mode of `open`. Raises RunError for a link, which might lead anywhere, and for what is
    no file, such as a pipe, on which one might wait without end."""

    def opener(name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RunError(f"{path} is a link; expected a file") from error
            raise

    with open(path, mode, opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise RunError(f"{path} is a device or a pipe; expected a file")
        yield file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises RunError, with the name of the file, where a write within it fails (a full disk): its OSError has none."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}") from error


def write_atomically(folder: Path, fill: Callable[[Path], object]) -> None:
    """Makes `folder` by filling a new one beside it, with checksums, synced to the disk before it gets its name.

    One that has the name is moved aside first: where a process is killed then, `remove_leftovers` gives it its name
    back. Raises RunError where writing fails (a full disk); what was there before stays.
    """
    replaced = _temporary(folder, REPLACED)
    try:
        with new_folder(folder) as draft:
            fill(draft)
            write_json(draft / CHECKSUMS, checksums(draft))
            for path in (*draft.rglob("*"), draft):
                sync(path)
            try:
                with suppress(FileNotFoundError):
                    folder.replace(replaced)
                draft.replace(folder)
            except BaseException:
                if not os.path.lexists(folder):
                    with suppress(FileNotFoundError):
                        replaced.replace(folder)
                raise
            sync(folder.parent)
    except Exception as error:
        # safetensors and torch have errors of their own for a full disk
        full = getattr(error, "errno", None) == errno.ENOSPC or any(
            words in str(error) for words in ("space left", "unexpected pos")
        )
        why = "the disk is full" if full else str(error)
        raise RunError(f"{folder} could not be written: {why}; earlier checkpoints are unchanged") from error
    remove(replaced)


@contextmanager
def new_folder(beside: Path) -> Iterator[Path]:
    """Makes an empty folder; what is left of it under its name is removed at the end."""
    draft = _temporary(beside, DRAFT)
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.mkdir()
    try:
        yield draft
    finally:
        remove(draft)


def remove_leftovers(output: Path) -> None:
    """Removes what processes left that were killed while they wrote; a folder that was moved aside, and whose place no
    other one has taken, gets its name back. Nobody may be writing there."""
    for path in list(output.iterdir()):
        if match := TEMPORARY.fullmatch(path.name):
            name, kind = match.groups()
            if kind == REPLACED and not os.path.lexists(output / name):
                path.replace(output / name)
            else:
                remove(path)


def _temporary(path: Path, kind: str) -> Path:
    """Returns a name beside `path` that nothing has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def discard(path: Path) -> None:
    """Removes a folder, which loses its name before it loses a part."""
    remove(path.replace(_temporary(path, DRAFT)))


def remove(path: Path) -> None:
    """Removes a folder with what it holds, a file, or a link and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class FolderLock:
    """Holds a folder, which no second run gets until this object is released or gone."""

    def __init__(self, folder: Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output_dir={folder} cannot be made: {error.strerror}") from error
        handle = os.open(folder, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(f"output_dir={folder} is in use by another run; expected a folder for each run") from None
        except OSError:  # a file system without locks
            pass


def checksums(folder: Path) -> dict[str, str]:
    """Returns SHA-256 of the files of a folder and of those within, by their paths in it. Raises RunError for a
    link."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            with open_file(path, "rb") as file:
                sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    sums.pop(CHECKSUMS, None)
    return sums


def sync(path: Path) -> None:
    """Syncs a file or a folder to the disk, as it is now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)
