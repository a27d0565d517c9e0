"""Writes the pages by which pip finds the wheels of dist/, an index per variant: `make wheels` does it, and installs
from them.

    python tools/wheel_index.py [--output FOLDER] [--files https://github.com/OWNER/NAME/releases/download/v0.1.0]

`pip install grpo-kernels --extra-index-url ADDRESS/cu130/` reads FOLDER/cu130/grpo-kernels/index.html of a static host
(PEP 503), whose links have the hash of each wheel, the Pythons that it serves, and the hash of its metadata, which lies
beside it (PEP 658). Links of earlier releases stay on the page.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote

DIST = Path(__file__).resolve().parents[1] / "dist"


def normalised(name: str) -> str:
    """Returns a project's name as pip asks for it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write_metadata(wheel: Path) -> Path:
    """Writes NAME.whl.metadata beside the wheel, which pip reads in its place to resolve dependencies."""
    with zipfile.ZipFile(wheel) as file:
        (inside,) = (name for name in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        beside = wheel.with_name(f"{wheel.name}.metadata")
        beside.write_bytes(file.read(inside))
    return beside


def link(wheel: Path, address: str) -> str:
    """Returns the line of a wheel that lies in the folder of this address."""
    metadata = write_metadata(wheel)
    required = re.search(r"^Requires-Python: *(.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    of_wheel, of_metadata = (f"sha256={sha256(file)}" for file in (wheel, metadata))
    attributes = {
        "href": f"{address.rstrip('/')}/{quote(wheel.name)}#{of_wheel}",
        **({"data-requires-python": required[1]} if required else {}),
        "data-core-metadata": of_metadata,
        "data-dist-info-metadata": of_metadata,  # for pip before 23.3
    }
    shown = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    return f"<a {shown}>{html.escape(wheel.name)}</a><br>"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_page(page: Path, lines: list[str]) -> None:
    """Writes these links in place of those of the same names, beside the others that the page has."""
    links = {}
    for line in [*(page.read_text(encoding="utf-8").splitlines() if page.exists() else ()), *lines]:
        if name := re.search(r">([^<>]+)</a>", line):
            links[name[1]] = line
    head = '<!DOCTYPE html>\n<meta charset="utf-8"><meta name="pypi:repository-version" content="1.0">'
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([head, *(links[name] for name in sorted(links)), ""]), encoding="utf-8")


def write_index(dist: Path, output: Path, files: str = "") -> list[Path]:
    """Returns the pages of the wheels in dist/VARIANT/; without an address `files` they are found from page to file."""
    pages = []
    for folder in sorted({wheel.parent for wheel in dist.glob("*/*.whl")}):
        for project in sorted({wheel.name.split("-")[0] for wheel in folder.glob("*.whl")}):
            page = output / folder.name / normalised(project) / "index.html"
            address = files or quote(os.path.relpath(folder, page.parent))
            write_page(page, [link(wheel, address) for wheel in sorted(folder.glob(f"{project}-*.whl"))])
            write_page(page.parents[1] / "index.html", [f'<a href="{page.parent.name}/">{page.parent.name}</a><br>'])
            pages.append(page)
    return pages


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine as a static host does; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write an index of the wheels in dist/.")
    parser.add_argument("--output", type=Path, default=DIST / "index", metavar="FOLDER")
    parser.add_argument("--files", default="", metavar="URL", help="where the wheels lie, all in one folder")
    arguments = parser.parse_args(argv)
    pages = write_index(DIST, arguments.output, arguments.files)
    print(*pages, sep="\n")
    return 0 if pages else f"no wheels in {DIST}: make wheels"


if __name__ == "__main__":
    sys.exit(main())
