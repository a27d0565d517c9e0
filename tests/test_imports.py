"""Dependencies point one way; csrc knows neither Python nor torch; what is missing is missed only when asked for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "grpo_kernels"
COMPILED = ("_cpu", "_cuda")
# From the ground up. A room is a folder, or a module beside the folders; it imports from its own floor and those below.
FLOORS = (
    ("names", "argument", "logit_transform"),
    ("loss_config",),
    ("kernels",),
    ("objective",),
    ("config", "checks", "reference", "sampling_mask", "teacher"),
    ("head",),
    ("corrections", "inputs", "rewards"),
    ("distillation", "logps", "loss", "policy"),
    ("__init__", "integrations"),
    ("trainer", "commands", "__main__"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it and if only for types, without the package's name."""
    package = ("grpo_kernels", *path.relative_to(PACKAGE).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            found.update(".".join([*base, alias.name]) for alias in node.names)
    names = {name.removeprefix("grpo_kernels.") for name in found if name.split(".")[0] == "grpo_kernels"}
    # `from .config import GRPOConfig` names the module one level up.
    return {name if is_module(name) else name.rpartition(".")[0] or "__init__" for name in names}


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir() or name in COMPILED


@lru_cache
def graph() -> dict[str, set[str]]:
    return {module_name(path): imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def room(name: str) -> str:
    return name.split(".")[0]


def rooms_of(name: str) -> set[str]:
    """The rooms of what a module imports."""
    return {room(other) for other in graph()[name] - {*COMPILED}}


def test_each_room_imports_its_own_floor_and_those_below():
    rank = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    assert {room(name) for name in graph()} == rank.keys()
    for name in graph():
        for other in rooms_of(name):
            assert rank[other] <= rank[room(name)], f"{name} imports {other}"


def test_no_two_rooms_need_each_other():
    needs = {name: set() for names in FLOORS for name in names}
    for name in graph():
        needs[room(name)] |= rooms_of(name) - {room(name)}
    TopologicalSorter(needs).prepare()


def test_the_reference_stands_alone():
    from grpo_kernels import reference

    assert graph()["reference"] == {"config", "names", "sampling_mask", "teacher"}
    assert not vars(reference).keys() & {"SamplingMask", "Teacher", "TopKTeacher"}  # those two are there for types
    assert [name for name in graph() if "reference" in graph()[name]] == ["commands.harness"]


def test_kernels_know_no_loss_and_the_loss_no_kernels():
    """A loss knows which rows a chunk has; a backend its operations, which losses it has in one launch, what it falls
    back to, and its launches."""
    for name in graph():
        own, others = room(name), graph()[name]
        if own == "objective":
            below = {"names", "loss_config", "kernels.operations", "kernels.fused_objective"}
            assert {other for other in others if room(other) != own} <= below, name
        if own == "kernels":
            assert rooms_of(name) <= {own, "names"}, name
        if name.startswith("kernels.torch"):
            assert all(other.startswith(("kernels.torch", "kernels.operations", "names")) for other in others), name
        if name.startswith("kernels.triton"):
            beside = {other for other in others if not other.startswith("kernels.triton")}
            fallback = {"kernels.torch.backend"} if name == "kernels.triton.backend" else set()
            shared = {"names", "kernels.operations", "kernels.launch", "kernels.fused_objective"}
            assert beside <= shared | fallback, name


# --- C++ --------------------------------------------------------------------------------------------------------------


def includes(path: Path) -> list[str]:
    return re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def sources(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]


def test_csrc_includes_neither_python_nor_torch_and_the_binding_not_torch():
    foreign = {"csrc": r"(torch|ATen|c10|pybind11|Python\.h|numpy|python)", "python": r"(torch|ATen|c10)"}
    for folder, names in foreign.items():
        assert sources(folder)
        for path in sources(folder):
            assert not any(re.match(names, name) for name in includes(path)), path


# --- what is not installed --------------------------------------------------------------------------------------------

BLOCKED = """
import sys, warnings
COMPILED = ("grpo_kernels._cpu", "grpo_kernels._cuda")
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "transformers", "matplotlib", "tqdm"} or name in COMPILED:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_anything_optional_a_loss_runs_with_one_warning():
    out = run(
        BLOCKED
        + """
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import grpo_kernels as gk
    assert not caught, caught
    assert gk.available_backends() == ("torch",)
    for seed in range(2):
        h = torch.randn(2, 3, 4, requires_grad=True)
        out = gk.fused_grpo_loss(h, torch.randn(5, 4), torch.zeros(2, 3).long(), torch.tensor([1.0, -1.0]))
        out.loss.backward()
        gk.group_advantages(torch.rand(4), num_generations=2)
    assert h.grad.abs().sum() > 0
ours = [str(w.message) for w in caught if "grpo_kernels" in str(w.message)]
assert len(ours) == 1, ours
print(ours[0])
try:
    gk.fused_grpo_loss(h, torch.randn(5, 4), torch.zeros(2, 3).long(), torch.ones(2), backend="cpu")
except ImportError as error:
    print("ImportError", error)
"""
    )
    warning, error = out.strip().splitlines()
    assert (
        "backend 'cpu' is not available" in warning and "compiled CPU kernels" in warning and "using 'torch'" in warning
    )
    assert error.startswith("ImportError backend='cpu' is not available") and "compiled CPU kernels" in error


def test_importing_is_light():
    """Neither CUDA nor Triton nor anything of the extras is touched."""
    out = run(
        """
import sys, torch
before = set(sys.modules)
import grpo_kernels, grpo_kernels.reference, grpo_kernels.head.loss_op
print(torch.cuda.is_initialized())
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "transformers", "matplotlib", "tqdm"}))
print("grpo_kernels._cpu" in sys.modules or "grpo_kernels._cuda" in sys.modules)
"""
    )
    assert out.split() == ["False", "[]", "False"]
