"""setup.py, tools/, Makefile, workflows: which compiler and architectures, and what is said of what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import addresses  # noqa: E402
import wheels  # noqa: E402
from kernel_build import cuda, host  # noqa: E402
from kernel_build.cuda import architectures, find_device_compiler  # noqa: E402
from kernel_build.host import BuildError  # noqa: E402
from kernel_build.nvrtc import Nvrtc  # noqa: E402

import setup  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CUDA is built on Linux alone")


class Cuda126:
    version, capabilities = (12, 6), [50, 60, 70, 75, 80, 86, 87, 89, 90]


class Cuda130:
    version, capabilities = (13, 0), [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]


def chosen(setting: str, compiler: object = Cuda130, development: bool = False) -> str:
    return " ".join(architectures(setting, compiler, development=development))


# --- architectures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "compiler", "expected"),
    [
        ("80 90a 120+ptx", Cuda130, "sm_80 sm_90a sm_120 compute_120"),
        ("8.0;9.0a,12.0+PTX", Cuda130, "sm_80 sm_90a sm_120 compute_120"),
        ("sm_86 86", Cuda130, "sm_86"),
        ("full", Cuda130, "sm_80 sm_86 sm_89 sm_90a sm_100 sm_120 compute_120"),
        ("full", Cuda126, "sm_80 sm_86 sm_89 sm_90a compute_90"),
    ],
)
def test_a_list_of_architectures(setting, compiler, expected):
    assert chosen(setting, compiler) == expected


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("80 hopper", "'hopper' is not like 80, 90a or 120+ptx"),
        ("8", "'8' is not like"),
        ("100", "CUDA 12.6 does not compile for 100, but for 50 60 70 75 80 86 87 89 90"),
        ("native", "no NVIDIA GPU answers here"),
    ],
)
def test_a_list_that_cannot_be(monkeypatch, setting, said):
    monkeypatch.setattr(cuda, "present_capabilities", list)
    with pytest.raises(BuildError, match="GRPO_KERNELS_CUDA_ARCHS=") as error:
        chosen(setting, Cuda126)
    assert said in str(error.value)


def test_the_gpu_that_is_here(monkeypatch):
    monkeypatch.setattr(cuda, "present_capabilities", lambda: [80, 90])
    assert chosen("") == chosen("", development=True) == chosen("native") == "sm_80 sm_90a"
    monkeypatch.setattr(cuda, "present_capabilities", lambda: [120])
    assert chosen("", Cuda126) == "compute_90"  # the driver compiles the rest
    monkeypatch.setattr(cuda, "present_capabilities", list)
    assert chosen("") == chosen("full") and chosen("", development=True) == "sm_80 sm_90a"


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Neither settings, a toolkit, packages nor a GPU; a folder for one of them."""
    for name in [name for name in os.environ if name.startswith(("GRPO_KERNELS_", "CUDA_"))]:
        monkeypatch.delenv(name)
    found = cuda.compiler_in
    monkeypatch.setattr(
        cuda, "compiler_in", lambda folder: found(folder) if tmp_path in (folder, *folder.parents) else None
    )
    monkeypatch.setattr(cuda, "Compiler", lambda library, include: (library, include))
    monkeypatch.setattr(cuda, "present_capabilities", list)
    return tmp_path


def fake_nvrtc(folder: Path, library: str, headers: str) -> tuple[Path, Path]:
    for file in (folder / library, folder / headers / "cuda_bf16.h"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder / library, folder / headers


@pytest.mark.parametrize(
    ("place", "library", "headers"),
    [
        ("GRPO_KERNELS_NVRTC", "nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/include"),
        ("CUDA_HOME", "lib64/libnvrtc.so.12", "include"),
        ("CUDA_PATH", "lib64/libnvrtc.so.13", "include"),
        ("sys.path", "nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/include"),
        ("purelib", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cuda_runtime/include"),
    ],
)
def test_where_nvrtc_is_found(bare, monkeypatch, place, library, headers):
    expected = fake_nvrtc(bare, library, headers)
    if place == "sys.path":
        monkeypatch.syspath_prepend(str(bare))
    elif place == "purelib":  # pip hides it from sys.path in a build of its own
        monkeypatch.setattr(cuda.sysconfig, "get_path", lambda name: str(bare))
    else:
        monkeypatch.setenv(place, str(bare))
    assert find_device_compiler() == expected


def test_no_nvrtc(bare, monkeypatch):
    with pytest.raises(BuildError, match="no NVRTC found; every CUDA build of torch has it, and so has pip install"):
        find_device_compiler()
    monkeypatch.setenv("GRPO_KERNELS_NVRTC", str(bare))
    with pytest.raises(BuildError, match=r"GRPO_KERNELS_NVRTC=.*: no NVRTC with headers in it"):
        find_device_compiler()
    monkeypatch.undo()


def test_an_unusable_nvrtc_gives_way_to_the_next_place(bare, monkeypatch, capsys):
    monkeypatch.undo()
    toolkit, packages = bare / "toolkit", bare / "packages"
    broken, _ = fake_nvrtc(toolkit, "lib64/libnvrtc.so.12", "include")
    monkeypatch.delenv("GRPO_KERNELS_NVRTC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setattr(cuda, "site", SimpleNamespace(getusersitepackages=lambda: None))
    monkeypatch.setattr(cuda.sysconfig, "get_path", lambda name: None)
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
    monkeypatch.setattr(cuda, "Nvrtc", lambda library: UsableNvrtc() if packages in library.parents else Nvrtc(library))
    usable, _ = fake_nvrtc(packages, "nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/include")
    assert find_device_compiler().library == usable
    assert f"grpo_kernels: {broken} cannot be used: " in capsys.readouterr().err

    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        BuildError, match=f"no NVRTC found; {broken} cannot be used: .*; every CUDA build of torch has it"
    ):
        find_device_compiler()
    monkeypatch.setenv("GRPO_KERNELS_NVRTC", str(toolkit))  # what is asked for by name is not replaced
    with pytest.raises(BuildError, match=f"{broken} cannot be used"):
        find_device_compiler()


class UsableNvrtc:
    def version(self) -> tuple[int, int]:
        return 13, 0

    def capabilities(self) -> list[int]:
        return [80, 90]


def test_a_build_in_isolation_asks_for_nvrtc_where_cuda_kernels_are_wanted(bare, monkeypatch):
    assert cuda.build_requirements() == []  # no GPU
    monkeypatch.setattr(cuda, "present_capabilities", lambda: [90])
    assert cuda.build_requirements() == list(cuda.PACKAGES["cu128"])
    monkeypatch.setenv("GRPO_KERNELS_CUDA", "0")
    assert cuda.build_requirements() == []
    monkeypatch.setenv("GRPO_KERNELS_CUDA", "1")
    monkeypatch.setattr(cuda, "present_capabilities", list)
    assert cuda.build_requirements() == list(cuda.PACKAGES["cu128"])
    monkeypatch.setenv("CUDA_HOME", str(bare))
    fake_nvrtc(bare, "lib64/libnvrtc.so.12", "include")
    assert cuda.build_requirements() == []


def test_one_range_of_pythons():
    """What pyproject.toml promises is what wheels are tried with, what make takes, and what the README says."""
    project = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert tuple(promised) == wheels.PYTHONS
    assert f'requires-python = ">={promised[0]}"' in project
    makefile = (ROOT / "Makefile").read_text()
    assert f"PYTHON ?= python3 {' '.join(f'python{version}' for version in reversed(promised))}\n" in makefile
    assert f"No Python {promised[0]} to {promised[-1]}$(WITH) among" in makefile
    past = int(promised[-1].split(".")[1]) + 1
    assert f"(3, 11) <= sys.version_info < (3, {past})" in makefile
    assert README.count(f"Python {promised[0]} to {promised[-1]}") == 1


def test_the_readme_and_make_say_the_same_of_downloads():
    makefile = (ROOT / "Makefile").read_text()
    (for_cpu, cpu_disk), (default, disk) = re.findall(
        r"^COST = \$\(call MEGABYTES,(\d+),(\d+)\)", makefile, re.MULTILINE
    )
    assert f"make demo TORCH=cpu    # downloads {for_cpu} MB" in README and f"downloads {for_cpu} MB\n" in makefile
    said = " ".join(README.split())
    assert f"the demos download {int(default):,} MB and fill {int(disk):,} MB in `.venv`" in said
    assert f"{for_cpu} and {int(cpu_disk):,} MB. The tests take more." in said


def test_the_readme_installs_this_version_from_the_address_of_the_wheels():
    """Which is a word as long as there is none."""
    address = addresses.URLS.get("Wheels", "ADDRESS/").removesuffix("/")
    commands = re.findall(r"pip install grpo-kernels==(\S+) --extra-index-url ([^\s`]+)", README)
    assert commands == [(f"{setup.version()}+cu130", f"{address}/cu130/")]


# --- setup.py ---------------------------------------------------------------------------------------------------------


def run_setup(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPO_KERNELS_")}
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**environment, **settings}, capture_output=True, text=True)


@pytest.mark.parametrize("repository", ["", "https://github.com/owner/name"])
def test_no_link_of_the_published_readme_is_relative(repository, tmp_path):
    """PyPI resolves none: they lead to the repository, or while it has no address are text."""
    code = (
        "import runpy, sys; sys.path.insert(0, 'tools'); import addresses; "
        f"addresses.URLS = {dict(Repository=repository) if repository else {}}; "
        f"sys.argv = ['setup.py', '--quiet', 'egg_info', '--egg-base', {str(tmp_path)!r}]; "
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.egg-info/PKG-INFO")
    metadata, _, page = path.read_text(encoding="utf-8").partition("\n\n")
    assert "\nDescription-Content-Type: text/markdown\n" in metadata and page.startswith("# grpo-kernels\n")
    targets, link = re.findall(r"\]\(([^)]*)\)", page), re.compile(r"\]\(([^):]*)\)")
    files = [target for target in link.findall(README) if not target.startswith("#")]
    assert len(files) > 20 and not link.findall(page)
    assert len(targets) == (len(re.findall(r"\]\(", README)) if repository else len(re.findall(r"\]\(https:", README)))
    for file in files if repository else ():
        assert f"]({repository}/{'raw' if file.endswith('.svg') else 'blob'}/main/{file})" in page
    assert not repository or f"]({repository}#documents)" in page


def test_the_local_version_is_of_wheels_alone():
    assert run_setup("--version").stdout.split() == ["0.1.0"]
    assert run_setup("--version", GRPO_KERNELS_LOCAL_VERSION="cu130").stdout.split() == ["0.1.0+cu130"]


def earlier_modules(folder: Path) -> list[Path]:
    folder.mkdir()
    suffixes = [".cpython-39-x86_64-linux-gnu.so", *EXTENSION_SUFFIXES[:2]]
    files = [folder / f"{name}{suffix}" for name in ("_cpu", "_cuda") for suffix in suffixes]
    for file in files:
        file.write_text("of an earlier build")
    return files


def test_a_module_replaces_those_of_other_names(tmp_path):
    """Which this Python would import in its place; those of other Pythons stay."""
    other, old, kept, *cuda_files = earlier_modules(tmp_path / "grpo_kernels")
    (tmp_path / "built.so").write_text("of this build")
    setup.replace(kept, tmp_path / "built.so")
    assert sorted(kept.parent.iterdir()) == sorted([other, kept, *cuda_files]) and not old.exists()
    assert kept.read_text() == "of this build"


def test_what_cannot_be_built_is_said_and_removed(tmp_path):
    stale = earlier_modules(tmp_path / "grpo_kernels")
    missing = {"CXX": "no-such-compiler", "GRPO_KERNELS_NVRTC": "/nowhere"}
    done = run_setup("build_ext", "--build-lib", str(tmp_path), GRPO_KERNELS_CUDA_ARCHS="80", **missing)
    assert done.returncode == 0 and [file.name for file in stale if file.exists()] == [stale[0].name, stale[3].name]
    cpu_line, cuda_line = done.stderr.splitlines()[-2:]
    assert cpu_line == (
        "grpo_kernels: no CPU kernels (CXX=no-such-compiler: no such program); the torch backend will be used."
    )
    assert cuda_line.startswith("grpo_kernels: no CUDA kernels (GRPO_KERNELS_NVRTC=/nowhere: no NVRTC with headers in ")
    assert cuda_line.endswith("); GPUs will use Triton or torch.")
    reasons = {file.name: file.read_text() for file in (tmp_path / "grpo_kernels").glob("*.missing")}
    assert (
        reasons["_cpu.missing"] == "CXX=no-such-compiler: no such program\n" and "/nowhere" in reasons["_cuda.missing"]
    )
    done = run_setup("build_ext", "--build-lib", str(tmp_path), GRPO_KERNELS_CUDA="1", **missing)
    assert done.returncode == 1 and "GRPO_KERNELS_CUDA=1, but GRPO_KERNELS_NVRTC=/nowhere: " in done.stderr
    done = run_setup("build_ext", "--build-lib", str(tmp_path), GRPO_KERNELS_NATIVE="1", **missing)
    assert done.returncode == 1 and "GRPO_KERNELS_NATIVE=1, but CXX=no-such-compiler" in done.stderr
    done = run_setup("build_ext", "--build-lib", str(tmp_path), GRPO_KERNELS_NATIVE="0")
    assert done.returncode == 0 and "no CUDA kernels (GRPO_KERNELS_NATIVE=0)" in done.stderr


@pytest.mark.parametrize(
    ("paths", "absent", "said"),
    [
        (
            "/nowhere",
            None,
            r"Python.h of Python 3\.\d+ is not in /nowhere; Debian and Ubuntu have it in python3\.\d+-dev",
        ),
        (None, "pybind11", "pybind11 is missing: pip install pybind11"),
    ],
)
def test_what_a_binding_needs_is_named(monkeypatch, paths, absent, said):
    if paths:
        monkeypatch.setattr(host.sysconfig, "get_paths", lambda: {"include": paths})
    if absent:
        monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(BuildError, match=said):
        host.python_flags()


# --- wheels and their release -----------------------------------------------------------------------------------------


def test_a_wheel_is_for_one_python_and_its_version_may_be_a_candidate(tmp_path):
    name = "grpo_kernels-0.1.0rc1+cu130-cp312-cp312-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as file:
        for module in ("_cpu", "_cuda"):
            file.writestr(f"grpo_kernels/{module}.cpython-312-aarch64-linux-gnu.so", "")
    wheel = wheels.Wheel("cu130", "3.12", "aarch64", tmp_path / name)
    assert wheels.wrong_contents(wheel, "0.1.0rc1") == []
    (problem,) = wheels.wrong_contents(wheel, "0.1.0")
    assert problem == f"has another name than {name.replace('rc1', '')}"
    problems = wheels.wrong_contents(wheel._replace(python="3.13"), "0.1.0rc1")
    assert len(problems) == 2 and "cpython-313-aarch64-linux-gnu.so" in problems[1]


def test_two_builds_of_a_commit_give_the_same_bytes(tmp_path):
    """Where the time of the commit is that of the files."""
    built = []
    for number in range(2):
        source = tmp_path / f"source{number}"
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "grpo_kernels", "tools"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            source.mkdir(exist_ok=True)
            copy(ROOT / name, source / name)
            os.utime(source / name, (number, 10**9 + 10**6 * number))
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", source]
        settings = {"GRPO_KERNELS_NATIVE": "0", "SOURCE_DATE_EPOCH": wheels.commit_date()}
        subprocess.run([*command, "--wheel-dir", tmp_path / str(number)], env={**os.environ, **settings}, check=True)
        (wheel,) = (tmp_path / str(number)).iterdir()
        built.append(wheel.read_bytes())
    assert built[0] == built[1]


def test_triton_is_left_to_torch():
    """That of a torch for ROCm is another package with the same folder, which triton's would be written over."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *(item for extra in ("train", "trl", "dev") for item in project["optional-dependencies"][extra]),
    ]
    assert not [item for item in needed if "triton" in item]


def test_actions_are_pinned_and_a_release_may_run_again():
    used = [x for file in (ROOT / ".github/workflows").iterdir() for x in re.findall(r"uses: *(.+)", file.read_text())]
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+.*", each) for each in used), used
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
    assert jobs["release"]["needs"] == "wheels" and jobs["pypi"]["needs"] == "release"
    assert jobs["pypi"]["steps"][-1]["with"]["skip-existing"] is True
    commands = "\n".join(step.get("run", "") for step in jobs["release"]["steps"])
    assert "gh release view" in commands and "--clobber" in commands and "git diff --cached --quiet ||" in commands


# --- make -------------------------------------------------------------------------------------------------------------


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "--no-print-directory", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_the_demo_installs_no_tools_of_developers(tmp_path):
    said = make("-n", "demo-chat", f"VENV={tmp_path}/new").stdout
    assert '-e ".[train,build]"' in said and "[dev]" not in said and "[peers]" not in said
    assert '-e ".[dev]"' in make("-n", "test", f"VENV={tmp_path}/new").stdout


def test_torch_for_cpus_comes_from_an_index_of_its_own(tmp_path):
    new = f"VENV={tmp_path}/new"
    said = make("-n", "demo", "TORCH=cpu", "TORCH_INDEX=https://index.example/cpu", new).stdout
    torch_, package = said.index("--index-url https://index.example/cpu torch\n"), said.index('-e ".[train,build]"')
    assert torch_ < package  # which finds a torch, and takes none from PyPI
    assert "-m venv .venv-cpu:" in make("-n", "demo", "TORCH=cpu").stdout or (ROOT / ".venv-cpu").exists()
    assert "--index-url" not in make("-n", "demo", new).stdout


def test_a_python_without_venv_is_passed_over_and_said(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.modules[\'ensurepip\'] = None; exec(sys.argv[1])" "$2"\n'
    )
    python.chmod(0o755)
    done = make(f"{tmp_path}/new/.created", f"VENV={tmp_path}/new", f"PYTHON={python}")
    assert done.returncode != 0 and "venv and ensurepip are missing, which are python3-venv of Debian" in done.stderr
    assert not (tmp_path / "new").exists()
