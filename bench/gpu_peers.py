"""Unpack the packages that `make gpu-peers` packed, on a machine without a network; bench/gpu.py does so with --peers.

    python bench/gpu_peers.py build/gpu-peers && export PYTHONPATH=build/gpu/site-packages

The parts may have come one by one: nothing is unpacked before all are there.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import sys
import tarfile
from pathlib import Path

# QuACK imports only from a folder of this name: it takes what lies in another for code that may change.
PEERS = Path(__file__).resolve().parents[1] / "build" / "gpu" / "site-packages"


def unpack(folder: Path, target: Path = PEERS) -> list[str]:
    """Put the parts in `folder` together, in `target`, unless that was done before.

    Returns the names of what is missing or damaged, of which nothing is unpacked.
    """
    sums, unpacked = folder / "SHA256SUMS", target / "SHA256SUMS"
    if not sums.is_file():
        return [sums.name]
    if unpacked.is_file() and unpacked.read_bytes() == sums.read_bytes():
        return []
    digests = {name: digest for digest, name in map(str.split, sums.read_text().splitlines())}
    parts = {name: (folder / name).read_bytes() for name in digests if (folder / name).is_file()}
    lacking = [name for name in digests if hashlib.sha256(parts.get(name, b"")).hexdigest() != digests[name]]
    if not lacking:
        shutil.rmtree(target, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(b"".join(parts.values())), mode="r:xz") as archive:
            archive.extractall(target, filter="data")
        # Python reads .pth files in its own folders alone; a module of this name it imports when it starts.
        (target / "sitecustomize.py").write_text(f"import site\n\nsite.addsitedir({str(target)!r})\n")
        shutil.copyfile(sums, unpacked)
    return lacking


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the parts, and their SHA256SUMS")
    if lacking := unpack(folder := parser.parse_args().folder):
        print(f"missing or damaged in {folder}: {', '.join(lacking)}", file=sys.stderr)
        return 1
    print(PEERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
