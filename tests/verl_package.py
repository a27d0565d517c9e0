"""verl 0.9.1 without its dependencies: the modules that the integration touches, the rest replaced by empty ones."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


class ActorConfig:
    """In the place of verl.workers.config.ActorConfig: what the policy losses read of it."""

    clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, None, 0.28, 1.5

    def __init__(
        self, strategy: str = "fsdp", rollout_n: int = 1, ppo_micro_batch_size_per_gpu: int = 1, **info: object
    ) -> None:
        self.global_batch_info = info

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


def stand_in(name: str, path: Path | None = None, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    if path is not None:
        module.__path__ = [str(path)]
    return module


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make verl.trainer.ppo.core_algos and verl.utils.kernel importable, without Ray, OmegaConf and TensorDict; the
    integration, imported anew."""
    found = importlib.util.find_spec("verl")
    if found is None:
        pytest.skip("verl is not installed: pip install --no-deps verl==0.9.1")
    root = Path(found.submodule_search_locations[0])
    modules = [
        stand_in("verl", root),
        stand_in("verl.utils", root / "utils", as_torch_index=None, group_mean_std=None),
        stand_in("verl.trainer", root / "trainer"),
        stand_in("verl.trainer.ppo", root / "trainer" / "ppo"),
        stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {})),
        stand_in("verl.workers", root / "workers"),
        stand_in("verl.workers.config", ActorConfig=ActorConfig),
    ]
    if importlib.util.find_spec("omegaconf") is None:
        modules.append(stand_in("omegaconf", DictConfig=dict))
    if importlib.util.find_spec("tensordict") is None:
        modules.append(stand_in("tensordict", TensorDict=dict))
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
    monkeypatch.delitem(sys.modules, "grpo_kernels.integrations.verl", raising=False)
    return importlib.import_module("grpo_kernels.integrations.verl")
