"""Builds the source archive and the wheels into dist/, and tries those that run here: `make wheels`.

    python tools/wheels.py [--variant cpu cu126 cu128 cu130 pure] [--machine x86_64 aarch64]
                           [--python 3.11 /path/to/python3.14 ...]

dist/ gets the source archive, and a folder per variant that pip reads with --find-links and with --extra-index-url.
Every wheel is built from the unpacked archive, for each CPython that is found here with its headers, in an environment
that has what pyproject.toml requires of a build and nothing else (wheel_builds.py), and checked (wheel_checks.py). No
CUDA toolkit and no compiler of this machine is used: the same versions compile everywhere. What is downloaded and
unpacked stays in build/wheels.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from wheel_builds import (
    DIST,
    HERE,
    MACHINES,
    PYTHONS,
    ROOT,
    VARIANTS,
    Builder,
    Failure,
    Wheel,
    find_pythons,
    virtual_environment,
    write_index,
)
from wheel_checks import broken_promises, complaints, import_modules, try_wheel


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build and try the wheels.")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES, metavar="MACHINE")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION_OR_PATH")
    arguments = parser.parse_args(argv)
    try:
        pythons = find_pythons(arguments.python)
        for missing in [name for name in arguments.python if name in PYTHONS and name not in pythons]:
            print(f"--- no CPython {missing} with its headers here: no wheels for it (--python takes a path, too)")
        return build_and_try(arguments.variant, arguments.machine, pythons)
    except Failure as failure:
        print(f"wheels: this failed: {failure}", file=sys.stderr)
        return 1


def build_and_try(variants: Iterable[str], machines: Sequence[str], pythons: Mapping[str, Path]) -> int:
    if not pythons:
        raise Failure(f"looking for a CPython {' or '.join(PYTHONS)} with its headers: none found")
    print(f"--- CPython {', '.join(f'{version} ({path})' for version, path in pythons.items())}", flush=True)
    builder = Builder(pythons)
    wheels = []
    for variant in variants:
        shutil.rmtree(DIST / variant, ignore_errors=True)
        for version, machine in combinations(variant, machines, builder):
            wheel = builder.build(variant, version, machine)
            wheels.append(wheel)
            size = wheel.file.stat().st_size / 1e6
            print(f"{wheel.file.relative_to(ROOT)}: {size:.2f} MB in {wheel.seconds:.0f} s", flush=True)
        write_index(DIST / variant)

    with_torch = virtual_environment("try", pythons[builder.first], ("torch", "numpy"))
    problems = [f"{wheel.file.name}: {problem}" for wheel in wheels for problem in check(wheel, builder, with_torch)]
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    if not problems:
        tried = Counter(how_tried(wheel, builder.first) for wheel in wheels)
        print(f"{len(wheels)} wheels in dist/: {', '.join(f'{count} {how}' for how, count in tried.items())}")
    return 1 if problems else 0


def combinations(variant: str, machines: Sequence[str], builder: Builder) -> list[tuple[str, str]]:
    """(Python, machine) of each wheel; the Python that has torch here comes first."""
    if variant == "pure":
        return [(builder.first, "any")]
    ordered = sorted(builder.pythons, key=lambda version: version != builder.first)
    return [(version, machine) for machine in machines for version in ordered]


def check(wheel: Wheel, builder: Builder, with_torch: Path) -> list[str]:
    """What is wrong with it, in lines."""
    problems = complaints(wheel) + broken_promises(wheel, builder.tools)
    if wheel.runs_here:
        print(f"--- trying {wheel.file.relative_to(ROOT)}", flush=True)
        problems += try_wheel(wheel, with_torch) if wheel.python == builder.first else import_modules(wheel)
    return problems


def how_tried(wheel: Wheel, first: str) -> str:
    if not wheel.runs_here:
        return f"for {wheel.machine} not run on this {HERE}"
    return f"{'installed and checked' if wheel.python == first else 'imported'} under Python {wheel.python}"


if __name__ == "__main__":
    sys.exit(main())
