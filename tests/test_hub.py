"""The package as a kernel of Hugging Face's `kernels`: what tools/hub.py writes is read and loaded by that library."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import kernels
import pytest
import torch
import triton_interpreter

import grpo_kernels as gk

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    spec = importlib.util.spec_from_file_location("hub", ROOT / "tools" / "hub.py")
    hub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hub)
    folder = tmp_path_factory.mktemp("hub")
    hub.write_kernel(folder)
    return folder


@pytest.fixture(params=["get_local_kernel", "get_kernel"])
def kernel(folder, request, monkeypatch):
    """The kernel, loaded from the folder; get_kernel is what programs call, and takes a folder from LOCAL_KERNELS."""
    if request.param == "get_local_kernel":
        loaded = kernels.get_local_kernel(folder, backend="cpu")
    else:
        monkeypatch.setenv("LOCAL_KERNELS", f"someone/grpo-kernels={folder}")
        loaded = kernels.get_kernel("someone/grpo-kernels", version=0, backend="cpu")
    triton_interpreter.serve(loaded.__name__)
    return loaded


def test_kernels_reads_what_is_written(folder):
    build = kernels._rust.Build.open(folder)  # raises for what kernel-builder would refuse
    assert [str(backend) for backend in build.general.backends] == ["cpu", "cuda", "rocm"]
    names = set()
    for variant in (folder / "build").iterdir():
        metadata = kernels.Metadata.read_from_file(variant / "metadata.json")
        assert variant.name == f"torch-{metadata.backend.backend_type}".lower()
        assert metadata.name.python_name == "grpo_kernels" and metadata.version == int(gk.__version__.split(".")[0])
        metadata.digest.validate(kernels._rust.Digest.hash_variant(metadata.digest.algorithm, variant))
        names.add(metadata.id)
    assert len(names) == 3 and all(name.isidentifier() for name in names)


def test_it_imports_torch_triton_and_itself(folder):
    """Of itself by relative imports: its name is another one in each process."""
    for path in (folder / "torch-ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            allowed = sys.stdlib_module_names | {"torch", "triton"}
            assert {name.split(".")[0] for name in found} <= allowed, path


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_loaded_kernel_computes_what_the_package_computes(kernel, backend):
    hidden, weight = torch.randn(4, 6, 16), torch.randn(40, 16)
    ids, advantages = torch.randint(40, (4, 6)), torch.randn(4)
    found = []
    for module in (kernel, gk):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        config = module.GRPOConfig.preset("dapo")
        loss = module.fused_grpo_loss(*leaves, ids, advantages, config=config, backend=backend).loss
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    assert kernel.__name__ != gk.__name__ and found[0][1].any()
    assert all(map(torch.equal, *found))


def test_its_operators_are_its_own(kernel):
    """Of two copies in one process each compiles to its own operators."""

    def operators_of(module) -> set[str]:
        graphs = []

        def backend(graph, _):
            graphs.append(graph.graph)
            return graph.forward

        torch.compiler.reset()
        compiled = torch.compile(lambda h, w, i: module.fused_logps(h, w, i, backend="torch"), backend=backend)
        compiled(torch.randn(2, 3, 8), torch.randn(20, 8), torch.ones(2, 3).long())
        targets = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
        return {target.split(".")[0] for target in targets if target.endswith("logps.default")}

    assert operators_of(gk) == {"grpo_kernels"}
    assert operators_of(kernel) == {kernel.__name__}
    assert operators_of(gk) == {"grpo_kernels"}
