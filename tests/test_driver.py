"""csrc/cuda/driver.cpp against a driver that only writes down what it is asked (driver/fake_libcuda.cpp)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from kernel_build.host import find_compiler  # noqa: E402
from kernel_build.images import Image, table  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CUDA is built on Linux alone")

FULL = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_120")
Run = Callable[..., list[str]]


def compiler() -> list[str]:
    """Without flags: what a sanitizer needs is not in the fake driver."""
    return [*find_compiler(), "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-pthread"]


def make_probe(folder: Path, architectures: tuple[str, ...], cuda: tuple[int, int]) -> Path:
    """The program of driver/probe.cpp with text as images, embedded as the build embeds device code."""
    images = []
    for architecture in architectures:
        sources = {"kernels": "fused stats"} | ({"lm_head_sm90": "head"} if architecture == "sm_90a" else {})
        for source, kernels in sources.items():
            file = Path(f"{source}.{architecture}")
            (folder / file).write_text(f"{source} for {architecture}: {kernels}")
            images.append(Image(architecture, source, file))
    (folder / "images.cpp").write_text(table(images, cuda))
    objects = [folder.parent / f"{name}.o" for name in ("driver", "libcuda", "probe")]
    command = [*compiler(), "images.cpp", *map(str, objects), "-o", "probe", "-ldl"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "probe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled parts: the fake driver, and the objects of the program."""
    folder = tmp_path_factory.mktemp("driver")
    jobs = [[str(ROOT / "tests/driver/fake_libcuda.cpp"), "-shared", "-fPIC", "-o", "libcuda.so"]]
    for source in ("csrc/cuda/driver.cpp", "csrc/cuda/libcuda.cpp", "tests/driver/probe.cpp"):
        jobs.append(["-c", str(ROOT / source), "-o", f"{Path(source).stem}.o"])
    running = [subprocess.Popen([*compiler(), *job], cwd=folder) for job in jobs]
    assert [job.wait() for job in running] == [0] * len(jobs)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """run("launch", "fused", capability=90, ...): the lines that come of it; `architectures` are those embedded."""
    probes: dict[object, Path] = {}

    def run(
        *commands: object, architectures: tuple[str, ...] = FULL, cuda: tuple[int, int] = (13, 0), **fake: object
    ) -> list[str]:
        built = (architectures, cuda)
        if built not in probes:
            place = folder / f"probe{len(probes)}"
            place.mkdir()
            probes[built] = make_probe(place, architectures, cuda)
        settings = {"GRPO_KERNELS_LIBCUDA": str(folder / "libcuda.so")}
        settings |= {f"FAKE_{name.upper()}": str(value) for name, value in fake.items() if name != "library"}
        if "library" in fake:
            settings["GRPO_KERNELS_LIBCUDA"] = str(fake["library"])
        done = subprocess.run(
            [str(probes[built]), *map(str, commands)], env={**os.environ, **settings}, capture_output=True, text=True
        )
        assert done.returncode == 0, done
        return done.stdout.splitlines()

    return run


def loads(lines: list[str]) -> list[str]:
    return [line.removeprefix("load ").partition(":")[0] for line in lines if line.startswith("load ")]


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "image"),
    [
        (80, "sm_80"), (86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_100"), (103, "sm_100"),
        (120, "sm_120"), (121, "sm_120"), (130, "compute_120"),
    ],
)  # fmt: skip
def test_a_device_runs_its_image(run, capability, image):
    lines = run("launch", "fused", "image", capability, capability=capability)
    also = ["lm_head_sm90 for sm_90a"] if image == "sm_90a" else []
    assert loads(lines) == [f"kernels for {image}", *also]
    assert f"launch fused of kernels for {image} on 0" in lines[-2] and lines[-1] == f"image '{image}'"


def test_the_head_is_looked_up_beside_the_other_kernels(run):
    lines = run("launch", "stats", "launch", "head")
    assert [line.partition(" on ")[0] for line in lines if line.startswith("launch")] == [
        "launch stats of kernels for sm_90a", "launch head of lm_head_sm90 for sm_90a"
    ]  # fmt: skip


SMALL = {"architectures": ("sm_80", "compute_90"), "cuda": (12, 8)}


@pytest.mark.parametrize(("capability", "built", "image"), [
    (100, {"architectures": ("sm_90a",)}, ""),  # specific code is for its device alone
    (90, {"architectures": ("sm_90", "sm_90a")}, "sm_90a"),
    (90, {"architectures": ("sm_90", "compute_80")}, "sm_90"),
    (75, {}, ""),
    (100, SMALL | {"version": 12080}, "compute_90"),
    (100, SMALL | {"version": 12060}, ""),  # PTX is for drivers that are not older than it
    (86, SMALL | {"version": 12060}, "sm_80"),
])  # fmt: skip
def test_the_image_for_a_device(run, capability, built, image):
    assert run("image", capability, **built) == [f"image '{image}'"]


# --- launches ---------------------------------------------------------------------------------------------------------


def test_a_launch(run):
    *_, line = run("launch", "fused")
    assert line == (
        "launch fused of kernels for sm_90a on 0: 2x1x1 128x1x1 shared 0 stream 5 argument 7 capture mode 0"
    )


def test_shared_memory_and_clusters(run):
    lines = run("cluster", "fused")
    assert f"attribute 8 of fused of kernels for sm_90a is {232448 - 1024}" in lines  # beside 1,024 static bytes
    assert "8x1x1 256x1x1 shared 200000 " in lines[-1] and lines[-1].endswith(" attribute 4 4x1x1")


def test_kernels_of_much_shared_memory_prefer_it_to_the_cache(run):
    """Said once, and not for a kernel that takes little: that one has use for the cache."""
    lines = run("launch", "stats", "cluster", "fused", "cluster", "fused")
    preferred = [i for i, line in enumerate(lines) if line == "attribute 9 of fused of kernels for sm_90a is 100"]
    launched = [i for i, line in enumerate(lines) if line.startswith("launch ")]
    assert len(preferred) == 1 and launched[0] < preferred[0] < launched[1] and len(launched) == 3
    assert not any(line.startswith("attribute 9 of stats") for line in lines)


def test_the_current_context_is_left_alone_and_without_one_the_primary_of_device_0_is_taken(run):
    lines = run("launch", "fused", "launch", "fused")
    assert [line for line in lines if line.startswith("retain")] == ["retain 0"]
    lines = run("launch", "fused", "device", current=1)
    assert "on 1: " in lines[-2] and not any(line.startswith("retain") for line in lines)
    assert lines[-1] == "device 90: 131 multiprocessors, 232448 bytes shared"


def test_code_is_loaded_once_per_context(run):
    twice = ["launch", "fused", "launch", "stats"]
    lines = run("current", 0, *twice, "current", 1, *twice, "current", 0, *twice)
    both = ["kernels for sm_90a", "lm_head_sm90 for sm_90a"]
    assert loads(lines) == both * 2
    assert [line.partition(": ")[0][-1] for line in lines if line.startswith("launch")] == list("001100")
    # After a reset the context has lost its code, though its address is the same.
    lines = run("current", 0, *twice, "reset", 0, *twice)
    assert loads(lines) == both * 2


def test_threads_load_once(run):
    lines = run("threads", "fused", current=0)
    assert len(loads(lines)) == 2 and sum(line.startswith("launch fused") for line in lines) == 8


def test_a_first_launch_while_a_graph_is_captured(run):
    lines = run("launch", "fused", capturing=1)
    assert len(loads(lines)) == 2 and lines[-1].endswith("capture mode 0")  # loaded, and the mode is as before


def test_a_tensor_map(run):
    lines = run("map", 208, "map", 201)
    assert lines == [
        "map of type 9, rank 2 at 4096: 200 x 300, row_stride 416, box 64 x 128, steps 1 1, 0 3 3 0",
        "word 101010101010101",
        "error: no tensor map for 300 rows of 200 elements, 201 apart: CUDA_ERROR_FAKE (number 1)",
    ]  # fmt: skip


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_no_driver(run):
    lines = run("launch", "fused", "device", "report", "image", 80, library="/nowhere/libcuda.so.1")
    assert lines[0] == lines[1] and lines[0].startswith("error: no NVIDIA driver was found (/nowhere/libcuda.so.1: ")
    assert "install one for CUDA 13.0 or later" in lines[0]
    assert lines[2] == f"built for 13000: {' '.join(FULL)}; driver 0"
    assert lines[3] == "image 'sm_80'"


WRONG = {
    "no GPU": ({"init": 100}, "the NVIDIA driver finds no GPU that it can use, see nvidia-smi: CUDA_ERROR_FAKE"),
    "an old driver": ({"version": 12080}, "supports CUDA 12.8, and these kernels need 13.0: update the driver"),
    "an old device": (
        {"capability": 75}, f"no kernels for a device of compute capability 7.5: this build has {' '.join(FULL)}"
    ),
    "PTX of a later CUDA": (
        {"capability": 100, "version": 12060, **SMALL},
        "no kernels for a device of compute capability 10.0: this build has sm_80 compute_90",
    ),
    "a launch that fails": (
        {"launch": 1},
        "kernel 'fused' cannot be launched with 8 blocks of 256 threads and 200000 bytes of shared memory in "
        "clusters of 4: CUDA_ERROR_FAKE (number 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(run, name):
    given, sentence = WRONG[name]
    *_, error = run("cluster", "fused", **given)
    assert error.startswith("error: ") and sentence in error


def test_drivers_of_the_same_major_version_and_newer_ones_serve(run):
    for version in (12000, 12080, 13010):
        assert run("launch", "fused", cuda=(12, 8), version=version)[-1].startswith("launch fused")


def test_a_driver_that_lacks_a_function(folder, run):
    """As a driver from before CUDA 11.8 does."""
    old = folder / "old.so"
    text = (ROOT / "tests/driver/fake_libcuda.cpp").read_text().replace("cuLaunchKernelEx", "cuNoSuchFunction")
    (folder / "old.cpp").write_text(text)
    subprocess.run([*compiler(), "old.cpp", "-shared", "-fPIC", "-o", str(old)], cwd=folder, check=True)
    (line,) = run("launch", "fused", library=old)
    assert "and these kernels need 13.0: update the driver" in line
