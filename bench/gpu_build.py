"""Builds what `gpu_report.py` runs: both modules in place, and beside them the CUDA kernels once more with a watchdog.

The second module is for the products' first contact alone: with -DGK_WATCHDOG a barrier that is waited for in vain ends
the kernel after two seconds and says which one it is, instead of holding the GPU until the process is killed. It is
built in a copy of the sources, since one build folder holds one set of flags, and at the same time, since the
compiler takes a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from gpu_work import ROOT

WATCHED = ROOT / "build" / "gpu-report" / "watched"  # a checkout of its own, to come first on Python's path
FLAG = "-DGK_WATCHDOG"
# Only the CUDA module: the CPU's has no barriers.
BUILD = (
    "import sys, sysconfig; sys.path.insert(0, 'tools')\n"
    "from kernel_build import cuda\n"
    "from setup import replace\n"
    "from pathlib import Path\n"
    "name = '_cuda' + sysconfig.get_config_var('EXT_SUFFIX')\n"
    "replace(Path('grpo_kernels', name), cuda.build(name, development=True))\n"
)


def main() -> int:
    copy()
    flags = f"{os.environ.get('GRPO_KERNELS_NVRTCFLAGS', '')} {FLAG}"
    with (WATCHED / "build.log").open("w+") as said:
        watched = subprocess.Popen(
            [sys.executable, "-c", BUILD], cwd=WATCHED, env={**os.environ, "GRPO_KERNELS_NVRTCFLAGS": flags},
            stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        in_place = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT)
        code = watched.wait()
        said.seek(0)
        print(f"with {FLAG}:\n{said.read()[-4000:]}", flush=True)
    if code != 0:
        print(f"gpu_build: no module with {FLAG}, exit status {code}", flush=True)
    return in_place.returncode


def copy() -> None:
    """Of what is built and run; objects that an earlier call built there are kept."""
    WATCHED.mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / "setup.py", WATCHED)
    for folder in ("csrc", "python", "tools", "grpo_kernels"):
        shutil.rmtree(WATCHED / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, WATCHED / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.new"))


if __name__ == "__main__":
    sys.exit(main())
