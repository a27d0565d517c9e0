"""Plants one small fault after the other and reports those that no test notices: `python tools/mutations.py`.

    python tools/mutations.py [--only TEXT ...] [--report FILE]

tools/mutations.txt holds the faults: a line `FILE :: TESTS` opens a section (TESTS: arguments of pytest), and each line
`BEFORE => AFTER` below it replaces the one occurrence of BEFORE in that file. ` ## TESTS` at its end names other tests.
Faults are planted in a copy of the working tree in build/mutations, whose compiled module is built again after a change
of csrc/. --only: faults whose section or line contains one of these texts. --report: a file that gets one line for each
fault. The exit status is 1 if a fault survives, or if its text no longer stands in its file exactly once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutations.txt"
COPY = ROOT / "build" / "mutations"
SECONDS = 600  # a fault may make a test hang, which is noticed too


class Mutation(NamedTuple):
    file: str
    before: str
    after: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {self.before} => {self.after}"


def read_list(text: str) -> Iterator[Mutation]:
    file = tests = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if " => " not in line:
            file, tests = line.split(" :: ")
            continue
        change, _, own_tests = line.partition(" ## ")
        before, after = change.split(" => ")
        yield Mutation(file, before, after.removesuffix("(nothing)"), own_tests or tests)


def copy_tree() -> None:
    """Tracked files, compiled modules and the objects of their build."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "grpo_kernels").glob("*.so")]
    for name in [*listed.rstrip("\0").split("\0"), *built]:
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)
    compile_copy()


def compile_copy() -> bool:
    """Whether the compiled module of the copy could be built."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = dict(os.environ, GRPO_KERNELS_NATIVE="1", GRPO_KERNELS_CUDA="0")
    return subprocess.run(command, cwd=COPY, env=environment, capture_output=True).returncode == 0


def passes(tests: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    environment = dict(os.environ, PYTHONPATH=str(COPY), PYTHONDONTWRITEBYTECODE="1")
    try:
        ran = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    if ran.returncode not in (0, 1, 2):  # no tests, or a wrong option
        raise SystemExit(f"pytest {tests}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ran.returncode == 0


def verdict(mutation: Mutation) -> str:
    path = COPY / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        return f"STALE ({text.count(mutation.before)} occurrences)"
    compiled = mutation.file.startswith("csrc/")
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    try:
        if compiled and not compile_copy():
            return "STALE (it does not compile)"
        return "SURVIVED" if passes(mutation.tests) else "killed"
    finally:
        path.write_text(text, encoding="utf-8")
        if compiled:
            compile_copy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    chosen = [m for m in read_list(LIST.read_text(encoding="utf-8")) if any(x in str(m) for x in arguments.only)]
    copy_tree()
    for tests in dict.fromkeys(m.tests for m in chosen):
        if not passes(tests):
            raise SystemExit(f"without a fault these tests fail: {tests}")
    lines = []
    for mutation in chosen:
        begin = time.perf_counter()
        lines.append(f"{verdict(mutation)}: {mutation}")
        print(f"{lines[-1]} ({time.perf_counter() - begin:.0f} s)", flush=True)
    if arguments.report:
        arguments.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    missed = [line for line in lines if not line.startswith("killed")]
    print(f"{len(lines)} faults, {len(missed)} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
