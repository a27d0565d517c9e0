"""Settings of the whole suite: one thread per process, the same random numbers every time, the backends.

Triton kernels run in Triton's interpreter, on the CPU. `pytest -m gpu` (make test-gpu) compiles them instead and runs
the tests that are marked so, and only these; both cannot be had in one process.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import pytest
import torch

pytest_plugins = ["outcomes"]
# accelerate parses the metadata of a package each time it asks whether that is there: a sixth of a trainer's short run.
importlib.metadata.metadata = lru_cache(importlib.metadata.metadata)


def on_device(config: pytest.Config) -> bool:
    return config.option.markexpr == "gpu"


def pytest_configure(config: pytest.Config) -> None:
    if on_device(config):  # each xdist worker has its part of the cores, for float64 at real vocabularies
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
    else:
        torch.set_num_threads(1)  # each xdist worker has a core; products this small gain nothing from threads
        run_gpu_backends_on_cpu()


def run_gpu_backends_on_cpu() -> None:
    """Triton in its interpreter, CUDA emulated; in this process, which as a fork may have both already."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before anything imports one
    from grpo_kernels import kernels as backends

    entry = backends._REGISTRY["cuda"]
    if entry.load is load_emulated_cuda:
        return
    import triton_interpreter

    triton_interpreter.install()
    triton_interpreter.serve("grpo_kernels")
    backends._REGISTRY["cuda"] = entry._replace(load=load_emulated_cuda, devices=("cpu",))


def load_emulated_cuda():
    """The CUDA kernels compiled for an emulated GPU, on CPU tensors, when the first test asks for them."""
    from emulator import build_module, load

    return load(build_module()), ""


SLOW = ("triton", "cuda")  # the interpreter and the emulator


def beyond_each_value(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that are not needed where the mark `each_value` asks a slow backend for every value of each
    parameter, and not for every combination of them."""
    groups, values = defaultdict(list), {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        backend = params.get("backend", params.get("kernels"))
        if backend in SLOW and item.get_closest_marker("each_value"):
            groups[item.path, item.originalname, backend].append(item)
            values[item] = {(name, repr(x)) for name, x in params.items()}
    kept: set[pytest.Item] = set()
    for group in groups.values():
        missing = set().union(*(values[item] for item in group))
        while missing:
            best = max(group, key=lambda item: len(missing & values[item]))
            kept.add(best)
            missing -= values[best]
    return values.keys() - kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    beyond = beyond_each_value(items)
    config.hook.pytest_deselected(items=[*beyond])
    items[:] = [item for item in items if item not in beyond]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # at the end one worker would wait for another
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))
    elif not on_device(config):
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


@pytest.fixture(autouse=True)
def _this_cpu_multiplies_bfloat16(monkeypatch):
    """Whether it does decides the way that bfloat16 takes: test_chunks.py has the one of a CPU that does not."""
    monkeypatch.setattr("grpo_kernels.head.chunk_size.cpu_multiplies", lambda dtype: dtype == torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_looked_for_among_new_objects():
    """Trainers often have all garbage collected: objects of 80 test modules took half of the time of their tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", "torch", "triton", "cuda"])
def backend(request) -> str:
    """Every backend; a missing one is a failure, never a skip."""
    return request.param


@pytest.fixture
def unwritten_is_nan():
    """Memory that nothing has been written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def emulated(unwritten_is_nan):
    """The CUDA kernels on the emulated GPU, whose settings are as before after the test."""
    from grpo_kernels.kernels import get_backend

    kernels = get_backend("cuda")
    yield kernels
    kernels.use()


@pytest.fixture(params=["triton", "cuda"])
def kernels(request, unwritten_is_nan):
    """Both tables of a GPU's kernels."""
    from grpo_kernels.kernels import get_backend

    return request.getfixturevalue("emulated") if request.param == "cuda" else get_backend(request.param)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Of the trainer's tests: a tiny model and its tokenizer."""
    import training

    return training.make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Of the trainer's tests: problems for that model."""
    import training

    return training.make_data(tmp_path_factory.mktemp("data") / "problems.jsonl")


@pytest.fixture
def trained(model, data, tmp_path):
    """Runs the trainer, which has to succeed: trained(folder below tmp_path, **options) is its output folder."""
    import training

    def run(name: str = "run", **options) -> Path:
        assert training.run(model, data, tmp_path / name, **options) == 0
        return tmp_path / name

    return run
