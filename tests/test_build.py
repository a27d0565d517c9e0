"""setup.py and tools/: which compiler and which architectures, and what is said where something is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import wheels  # noqa: E402
from kernel_build import cuda  # noqa: E402
from kernel_build.cuda import Architecture, architectures, device_sources, find_device_compiler  # noqa: E402
from kernel_build.host import BuildError, HostModule, NinjaFile  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CUDA is built on Linux alone")


class Cuda126:
    name, version, capabilities = "nvcc", (12, 6), [50, 60, 70, 75, 80, 86, 87, 89, 90]


class Cuda130:
    name, version, capabilities = "nvcc", (13, 0), [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]


def chosen(setting: str, compiler: object = Cuda130, development: bool = False) -> str:
    return " ".join(map(str, architectures(setting, compiler, development=development)))


# --- architectures ----------------------------------------------------------------------------------------------------


def test_a_list_of_architectures():
    assert chosen("80 90a 120+ptx") == "sm_80 sm_90a sm_120 compute_120"
    assert chosen("8.0;9.0a,12.0+PTX") == "sm_80 sm_90a sm_120 compute_120"
    assert chosen("sm_86 86") == "sm_86"
    assert chosen("full") == "sm_80 sm_86 sm_89 sm_90a sm_100 sm_120 compute_120"
    assert chosen("full", Cuda126) == "sm_80 sm_86 sm_89 sm_90a compute_90"


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


def test_the_products_are_for_their_device_alone():
    everywhere = {source.stem for source in device_sources(Architecture(80))}
    hopper = {source.stem for source in device_sources(Architecture(90, specific=True))}
    assert "kernels" in everywhere and hopper - everywhere == {"head_sm90"}
    for other in (Architecture(90), Architecture(120, ptx=True)):
        assert {source.stem for source in device_sources(other)} == everywhere


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Neither toolkit nor settings; a folder for one."""
    for name in [name for name in os.environ if name.startswith(("GRPO_KERNELS_", "CUDA_", "NVCC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(cuda.shutil, "which", lambda name, path=None: None if name == "nvcc" else f"/usr/bin/{name}")
    return tmp_path


def fake_nvcc(folder: Path, preprocesses: bool) -> Path:
    """A toolkit that knows its version, and has a host compiler or not."""
    script = folder / "bin" / "nvcc"
    script.parent.mkdir()
    rest = "exit 0" if preprocesses else "echo 'gcc: No such file or directory' >&2; exit 1"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--version) echo 'Cuda compilation tools, release 12.8, V12.8.93' ;;\n"
        "--list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;\n"
        f"*) {rest} ;;\n"
        "esac\n"
    )
    script.chmod(0o755)
    return folder


def test_no_toolkit(bare):
    with pytest.raises(BuildError, match="no nvcc found: CUDA_HOME=/path/to/cuda names a CUDA toolkit"):
        find_device_compiler()


def test_cuda_home_that_points_nowhere(bare, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(BuildError, match="CUDA_HOME=/nowhere: no bin/nvcc there; name a CUDA toolkit, or unset CUDA_"):
        find_device_compiler()


def test_nvcc_without_a_host_compiler(bare, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(bare, preprocesses=False)))
    with pytest.raises(BuildError, match="has no host compiler that works") as error:
        find_device_compiler()
    assert "(gcc: No such file or directory): install a g++ that CUDA 12.8 supports" in str(error.value)
    assert "NVCC_CCBIN=/path/to/g++" in str(error.value)


def test_a_toolkit_by_cuda_path(bare, monkeypatch):
    monkeypatch.setenv("CUDA_PATH", str(fake_nvcc(bare, preprocesses=True)))
    compiler = find_device_compiler()
    assert compiler.version == (12, 8) and compiler.capabilities == [80, 90] and str(compiler) == "nvcc 12.8"


def test_a_toolkit_that_does_not_run(bare, monkeypatch):
    fake_nvcc(bare, preprocesses=True)
    (bare / "bin" / "nvcc").write_text("not a program")
    monkeypatch.setenv("CUDA_HOME", str(bare))
    with pytest.raises(BuildError, match="bin/nvcc does not run"):
        find_device_compiler()


def test_nvrtc_that_is_not_there(bare, monkeypatch):
    monkeypatch.setenv("GRPO_KERNELS_NVRTC", str(bare))
    with pytest.raises(BuildError, match=r"no libnvrtc\.so\.\* in it; it is a folder into which pip has installed"):
        find_device_compiler()


def test_ninja_builds_what_changed(tmp_path):
    """Through a path with a space and a dollar sign."""
    folder = tmp_path / "a $ folder"
    source = folder / "module.cpp"
    folder.mkdir()
    source.write_text("int answer() { return 42; }\n")

    def build() -> int:
        ninja_file = NinjaFile(folder)
        module = HostModule(ninja_file)
        module.add(source)
        built = module.link("module.so")
        ninja_file.run()
        return built.stat().st_mtime_ns

    first = build()
    assert build() == first
    source.write_text("int answer() { return 43; }\n")
    assert build() > first
    source.write_text("no C++\n")
    with pytest.raises(BuildError, match="the compiler failed"):
        build()


# --- setup.py ---------------------------------------------------------------------------------------------------------


def run_setup(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPO_KERNELS_")}
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**environment, **settings}, capture_output=True, text=True)


def test_the_local_version_is_of_wheels_alone():
    assert run_setup("--version").stdout.split() == ["0.1.0"]
    assert run_setup("--version", GRPO_KERNELS_LOCAL_VERSION="cu130").stdout.split() == ["0.1.0+cu130"]


def test_what_cannot_be_built_is_said_and_removed(tmp_path):
    suffix = subprocess.check_output(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"], text=True
    ).strip()
    stale = [tmp_path / "grpo_kernels" / f"{name}{suffix}" for name in ("_cpu", "_cuda")]
    stale[0].parent.mkdir()
    for file in stale:
        file.write_text("of an earlier build")
    missing = {"CXX": "no-such-compiler", "CUDA_HOME": "/nowhere"}
    done = run_setup("build_ext", "--build-lib", str(tmp_path), **missing)
    assert done.returncode == 0 and not any(file.exists() for file in stale)
    assert done.stderr.splitlines()[-2:] == [
        "grpo_kernels: no CPU kernels (CXX=no-such-compiler: no such program); the torch backend will be used.",
        "grpo_kernels: no CUDA kernels (CUDA_HOME=/nowhere: no bin/nvcc there; name a CUDA toolkit, or unset CUDA_HOME)"
        "; GPUs will use Triton or torch.",
    ]
    done = run_setup("build_ext", "--build-lib", str(tmp_path), GRPO_KERNELS_CUDA="1", **missing)
    assert done.returncode == 1 and "GRPO_KERNELS_CUDA=1, but CUDA_HOME=/nowhere: " in done.stderr
    done = run_setup("build_ext", "--build-lib", str(tmp_path), GRPO_KERNELS_NATIVE="1", **missing)
    assert done.returncode == 1 and "GRPO_KERNELS_NATIVE=1, but CXX=no-such-compiler" in done.stderr
    done = run_setup("build_ext", "--build-lib", str(tmp_path), GRPO_KERNELS_NATIVE="0")
    assert done.returncode == 0 and "no CUDA kernels (GRPO_KERNELS_NATIVE=0)" in done.stderr


@pytest.fixture
def editable(monkeypatch, tmp_path):
    """setup.py's build_ext as an editable install runs it, in an empty folder; modules are made by `write`."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GRPO_KERNELS_")]:
        monkeypatch.delenv(name)
    modules = [script.Extension(script.CPU, []), script.Extension(script.CUDA, [])]
    command = script.NinjaBuild(
        setuptools.Distribution({"name": "x", "packages": ["grpo_kernels"], "ext_modules": modules})
    )
    command.editable_mode = True
    command.ensure_finalized()

    def write(filename: str, **options: object) -> Path:
        Path("built").write_text(filename)
        return Path("built")

    return command, write


def refuse(filename: str, **options: object) -> Path:
    raise BuildError("no compiler")


@pytest.mark.filterwarnings("ignore:setup.py install is deprecated")
def test_an_editable_build_names_the_modules_beside_the_python_files(editable, monkeypatch):
    """setuptools asks the extensions that it prepared for their outputs, after the build: pip install -e . failed."""
    command, write = editable
    monkeypatch.setattr("kernel_build.cpu.build", write)
    monkeypatch.setattr("kernel_build.cuda.build", write)
    command.run()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    beside = {f"grpo_kernels/{name}{suffix}" for name in ("_cpu", "_cuda")}
    assert set(command.get_output_mapping().values()) == beside and all(Path(name).exists() for name in beside)
    assert command.get_outputs() == sorted(str(Path(command.build_lib, name)) for name in beside)


@pytest.mark.filterwarnings("ignore:setup.py install is deprecated")
def test_an_editable_build_that_fails_names_nothing(editable, monkeypatch, capsys):
    command, _ = editable
    monkeypatch.setattr("kernel_build.cpu.build", refuse)
    monkeypatch.setattr("kernel_build.cuda.build", refuse)
    command.run()
    assert command.get_outputs() == [] and command.get_output_mapping() == {}
    assert "no CPU kernels (no compiler)" in capsys.readouterr().err


# --- wheels -----------------------------------------------------------------------------------------------------------


def make_wheel(folder: Path, name: str, modules: tuple[str, ...]) -> Path:
    file = folder / name
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("grpo_kernels/__init__.py", "")
        for module in modules:
            archive.writestr(f"grpo_kernels/{module}.cpython-311-x86_64-linux-gnu.so", "")
    return file


TAG = "cp311-cp311-manylinux_2_34_x86_64"


@pytest.mark.parametrize(
    ("variant", "name", "modules", "said"),
    [
        ("cpu", f"grpo_kernels-0.1.0+cpu-{TAG}.whl", ("_cpu",), None),
        ("cu126", f"grpo_kernels-0.1.0+cu126-{TAG}.whl", ("_cpu", "_cuda"), None),
        ("pure", "grpo_kernels-0.1.0-py3-none-any.whl", (), None),
        ("cpu", f"grpo_kernels-0.1.0+cpu-{TAG}.whl", ("_cpu", "_cuda"), "holds the modules ['_cpu', '_cuda']"),
        ("cu126", f"grpo_kernels-0.1.0+cu126-{TAG}.whl", ("_cpu",), "holds the modules ['_cpu']"),
        ("cu126", f"grpo_kernels-0.1.0+cu130-{TAG}.whl", ("_cpu", "_cuda"), "has the version 0.1.0+cu130"),
        ("cpu", "grpo_kernels-0.1.0+cpu-cp311-cp311-linux_x86_64.whl", ("_cpu",), "has the wrong tag"),
        ("cpu", "grpo_kernels-0.1.0+cpu-cp312-cp312-manylinux_2_34_x86_64.whl", ("_cpu",), "has the wrong tag"),
        ("pure", f"grpo_kernels-0.1.0-{TAG}.whl", (), "is not for every Python and platform"),
    ],
)
def test_what_a_wheel_holds(tmp_path, variant, name, modules, said):
    file = make_wheel(tmp_path, name, modules)
    found = wheels.complaints(wheels.Wheel(variant, "3.11", file, 0.0))
    assert found == [] if said is None else any(said in line for line in found)


def test_libraries_of_a_module(monkeypatch):
    names = ("libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6")
    said = "\tlinux-vdso.so.1 (0x7f)\n" + "".join(f"\t{name} => /lib/{name} (0x7f)\n" for name in names)
    said += "\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n"
    monkeypatch.setattr(wheels, "run", lambda *command: said)
    assert wheels.foreign_libraries(Path("module.so")) == []
    said += "\tlibcudart.so.12 => not found\n\tlibcuda.so.1 => not found\n"
    assert wheels.foreign_libraries(Path("module.so")) == ["libcudart.so.12", "libcuda.so.1"]


def test_an_index_page(tmp_path):
    file = make_wheel(tmp_path, f"grpo_kernels-0.1.0+cpu-{TAG}.whl", ("_cpu",))
    wheels.write_index(tmp_path)
    page = (tmp_path / "grpo-kernels" / "index.html").read_text()
    assert f'<a href="../{file.name.replace("+", "%2B")}#sha256=' in page and f">{file.name}</a>" in page
    assert 'href="grpo-kernels/"' in (tmp_path / "index.html").read_text()
