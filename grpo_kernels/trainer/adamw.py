"""AdamW of the trained parameters, whatever their type."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .arguments import ADAMW, TrainArguments


class MasterAdamW(torch.optim.AdamW):
    """AdamW that steps float32 copies of the parameters which have fewer bits.

    A bfloat16 weight has 8 bits: at a learning rate of 1e-6 its step is rounded away. Here the state of such a
    parameter has float32 moments and "master", the weight in float32; after each step the parameter is its master,
    rounded. Parameters of float32 are stepped as by torch, to the bit. State is made at the first gradient: FSDP2
    replaces parameters after the optimizer was made.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes a step. closure: None, as everybody calls it here."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in trained]
            masters = [state.get("master", p) for p, state in zip(trained, states, strict=True)]
            adamw(
                masters, [p.grad.to(master.dtype) for p, master in zip(trained, masters, strict=True)],
                [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], [],
                [state["step"] for state in states], amsgrad=False, maximize=False, beta1=group["betas"][0],
                beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            )  # fmt: skip
            for p, master in zip(trained, masters, strict=True):
                if p is not master:
                    p.copy_(master)

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            master = p.detach()
            if is_low(p):
                master = state["master"] = master.float()
            state |= {"step": torch.tensor(0.0)} | {x: torch.zeros_like(master) for x in ("exp_avg", "exp_avg_sq")}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, to the bit: torch casts a state to the type of its parameter."""
        super().load_state_dict(state_dict)
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for name, p in zip(names, parameters, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                if key != "step":  # which torch leaves as it is
                    self.state[p][key] = value.to(p.device)


def is_low(p: Tensor) -> bool:
    """Says whether a parameter has fewer bits than float32."""
    return p.is_floating_point() and p.dtype.itemsize < torch.float32.itemsize


def check_state_of(optimizer: Any) -> None:
    """Raises ValueError where a state that was loaded is not one of its parameters."""
    for p, state in optimizer.state.items():
        expected = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if is_low(p) else set())
        if state.keys() != expected or any(x.shape != p.shape for name, x in state.items() if name != "step"):
            shapes = {name: tuple(x.shape) for name, x in state.items()}
            raise ValueError(f"{shapes} is no state of AdamW for a parameter of shape {tuple(p.shape)} in {p.dtype}")


def make_optimizer(parameters: Iterable[nn.Parameter], a: TrainArguments) -> torch.optim.AdamW:
    """Returns AdamW of the parameters that are trained, torch's own where all are of float32."""
    trained = [p for p in parameters if p.requires_grad]
    options: dict[str, Any] = {"weight_decay": 0.0} | (a.optim_args or {})
    if not options.keys() <= set(ADAMW):
        raise ValueError(f"optim_args={a.optim_args}; expected no others than {', '.join(ADAMW)}")
    groups: list[dict[str, Any]] = [  # biases and norms do not decay
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    kind = MasterAdamW if any(map(is_low, trained)) else torch.optim.AdamW
    where, weight = f"learning_rate={a.learning_rate}, optim_args={a.optim_args}", nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    try:
        if "betas" in options and len(options["betas"]) != 2:
            raise ValueError("expected two numbers as betas")
        torch.optim.AdamW([weight], lr=a.learning_rate, **options).step()
        optimizer = kind([group for group in groups if group["params"]], lr=a.learning_rate, **options)
    except Exception as error:  # of many types, as are the values of optim_args
        raise ValueError(f"{where}: {error}") from None
    if not 0 < weight.abs() < math.inf:
        raise ValueError(f"{where}: a step changes a weight of 0 by {abs(weight.item())}; expected a positive number")
    return optimizer
