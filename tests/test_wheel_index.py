"""tools/wheel_index.py: pip finds the wheel of a CUDA version on its page, beside the plain one of an index as PyPI is,
from a server on this machine; with wheels of a few bytes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from wheel_index import served, write_index

PLATFORM = "py3-none-any"


def make_wheel(folder: Path, version: str) -> Path:
    """A wheel that pip installs, with a module that says its version."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, info = folder / f"grpo_kernels-{version}-{PLATFORM}.whl", f"grpo_kernels-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("grpo_kernels.py", f"version = {version!r}\n")
        head = f"Metadata-Version: 2.1\nName: grpo-kernels\nVersion: {version}\n"
        file.writestr(f"{info}/METADATA", f"{head}Requires-Python: >=3.11,<4\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {PLATFORM}\n")
        file.writestr(f"{info}/RECORD", f"grpo_kernels.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return wheel


@pytest.fixture
def dist(tmp_path):
    """What a release writes, with the plain wheel where PyPI would have it."""
    for variant in ("pure", "cu128", "cu130"):
        make_wheel(tmp_path / "dist" / variant, "0.1.0" if variant == "pure" else f"0.1.0+{variant}")
    write_index(tmp_path / "dist", tmp_path / "dist" / "index")
    return tmp_path / "dist"


def install(dist: Path, *what: str, variant: str = "cu130") -> tuple[str, str]:
    """Returns (the version that pip installs from the plain index and this variant's, what pip says)."""
    target = dist.parent / f"installed-{len(list(dist.parent.iterdir()))}"
    with served(dist) as address:
        indexes = ("--index-url", f"{address}/index/pure/", "--extra-index-url", f"{address}/index/{variant}/")
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--no-cache-dir", *indexes]
        settings = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
        done = subprocess.run([*command, "--target", target, *what], env=settings, capture_output=True, text=True)
    module = target / "grpo_kernels.py"
    return (module.read_text().split("'")[1] if module.exists() else "", done.stdout + done.stderr)


def page(dist: Path, variant: str) -> Path:
    return dist / "index" / variant / "grpo-kernels" / "index.html"


@pytest.mark.parametrize("variant", ["cu128", "cu130"])
def test_a_local_version_goes_before_the_plain_one(dist, variant):
    version, said = install(dist, "grpo-kernels", variant=variant)
    assert version == f"0.1.0+{variant}" and ".metadata" in said, said


def test_a_later_plain_version_goes_before_it_unless_it_is_named(dist):
    make_wheel(dist / "pure", "0.1.1")
    write_index(dist, dist / "index")
    assert install(dist, "grpo-kernels")[0] == "0.1.1"
    assert install(dist, "grpo_kernels==0.1.0")[0] == "0.1.0+cu130"
    assert install(dist, "grpo-kernels==0.1.0+cu130")[0] == "0.1.0+cu130"
    version, said = install(dist, "grpo-kernels==0.1.1+cu130")
    assert version == "" and "No matching distribution found for grpo-kernels==0.1.1+cu130" in said


def test_a_wheel_that_was_changed_is_refused(dist):
    (wheel,) = (dist / "cu130").glob("*.whl")
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr("more.py", "")
    version, said = install(dist, "grpo-kernels")
    assert version == "" and "DO NOT MATCH THE HASHES" in said


def test_links_are_to_the_files_of_a_release_and_keep_those_of_earlier_ones(dist, tmp_path):
    pages, address = tmp_path / "pages", "https://github.com/owner/name/releases/download/v"
    write_index(dist, pages, f"{address}0.1.0")
    (old,) = (dist / "cu130").glob("*.whl")
    digest = hashlib.sha256(old.read_bytes()).hexdigest()
    old.unlink()
    make_wheel(dist / "cu130", "0.2.0+cu130")
    for _ in range(2):
        write_index(dist, pages, f"{address}0.2.0/")
    text = (pages / "cu130/grpo-kernels/index.html").read_text()
    links = re.findall(r'<a href="([^"]+)" data-requires-python="([^"]+)" [^>]*>([^<]+)</a>', text)
    assert [name for *_, name in links] == [f"grpo_kernels-{v}+cu130-{PLATFORM}.whl" for v in ("0.1.0", "0.2.0")]
    assert links[0][0] == f"{address}0.1.0/grpo_kernels-0.1.0%2Bcu130-{PLATFORM}.whl#sha256={digest}"
    assert links[1][0].startswith(f"{address}0.2.0/grpo_kernels-0.2.0%2Bcu130-") and links[1][1] == "&gt;=3.11,&lt;4"
    assert (pages / "cu130/index.html").read_text().count('<a href="grpo-kernels/">grpo-kernels</a>') == 1
    assert page(dist, "cu128").exists() and page(dist, "pure").exists()
