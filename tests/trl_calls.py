"""Inputs of TRL's trainers that a run does not have, their loss and gradients, and rollouts of other engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import trl
import trl_parity as parity
from tiny_models import VOCAB

from grpo_kernels.integrations import trl as integration

ROWS, PROMPT, LENGTH = 5, 4, 6


def crafted_inputs(seed: int = 0, length: int = LENGTH) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(length) < torch.tensor([[6], [3], [1], [0], [5]])).long()
    old = -2.0 - torch.rand(ROWS, length, generator=g) * 3
    return {
        "prompt_ids": torch.randint(10, VOCAB, (ROWS, PROMPT), generator=g),
        "prompt_mask": torch.tensor([[0, 1, 1, 1]]).repeat(ROWS, 1),
        "completion_ids": torch.randint(10, VOCAB, (ROWS, length), generator=g),
        "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=g),
        "old_per_token_logps": old * mask,
        "ref_per_token_logps": (old + 0.3 * torch.randn(ROWS, length, generator=g)) * mask,
        "num_items_in_batch": torch.tensor(23),
    }


def ratios(mode: str, seed: int = 2) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    shape = (ROWS, 1) if mode.startswith("sequence") else (ROWS, LENGTH)
    found = torch.rand(shape, generator=g) * 1.5 + 0.3
    if mode.endswith("mask"):
        found = found.masked_fill(found > 1.4, 0.0)
    return found if shape[1] == 1 else torch.where(crafted_inputs()["completion_mask"].bool(), found, 1.0)


def unknown_sampling_logps() -> torch.Tensor:
    old = crafted_inputs()["old_per_token_logps"]
    found = old + 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(3))
    found[0, 1], found[4, 0] = torch.nan, torch.nan
    return found


TOOLS = torch.ones(ROWS, LENGTH, dtype=torch.long)
TOOLS[0, 2:4] = TOOLS[4, 0] = 0
VLLM_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
PER_TOKEN = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(4))
CRAFTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments; what is changed in the inputs
    "plain": ({}, {}),
    "on-policy": ({}, {"old_per_token_logps": None}),
    "tools": ({}, {"tool_mask": TOOLS}),
    "tools, quantile and bonus": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.1}, {"tool_mask": TOOLS}),
    **{
        f"vLLM {mode}": ({"vllm_importance_sampling_mode": mode}, {"importance_sampling_ratio": ratios(mode)})
        for mode in VLLM_MODES
    },
    "sampling log-probabilities": (
        {"off_policy_mask_threshold": 0.02}, {"sampling_per_token_logps": unknown_sampling_logps()}
    ),
    "off-policy mask by old log-probabilities": ({"off_policy_mask_threshold": 0.02}, {}),
    "all masked": ({"entropy_coef": 0.1}, {"completion_mask": torch.zeros(ROWS, LENGTH, dtype=torch.long)}),
    "all masked, quantile": ({"top_entropy_quantile": 0.4}, {"tool_mask": torch.zeros(ROWS, LENGTH, dtype=torch.long)}),
    "advantages per token": ({}, {"advantages": PER_TOKEN}),
    "advantages per token, off-policy mask": ({"off_policy_mask_threshold": 0.02}, {"advantages": PER_TOKEN}),
    "one column": ({}, {}),
    "auxiliary loss": ({"router_aux_loss_coef": 0.1}, {}),
    "vespo_lambda 0": ({"vespo_lambda_pos": 0.0, "vespo_lambda_neg": 0.0}, {}),
}  # fmt: skip


def computed(cls: Any, name: str, options: dict[str, Any], mode: str, seed: int = 0) -> dict[str, Any]:
    """Loss and logged numbers, and gradients in place of the weights, of one micro-batch, as a run has them."""
    own, changes = CRAFTED[name]
    family = "mixtral" if name == "auxiliary loss" else "qwen2"
    trainer = parity.make_trainer(cls, family, {**options, **own})
    trainer.current_gradient_accumulation_steps = 2
    trainer.use_vllm = name.startswith("vLLM")  # without an engine
    trainer.model.train(mode == "train")
    inputs = {**crafted_inputs(seed, length=1 if name == "one column" else LENGTH), **changes}
    inputs = {key: x for key, x in inputs.items() if x is not None}
    loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.dtype == torch.float32  # under autocast too
    loss.backward()
    log = {key: x for key, (x,) in trainer._metrics[mode].items()}
    gradients = {n: torch.zeros(1) if p.grad is None else p.grad for n, p in trainer.model.named_parameters()}
    return {"log": [{"loss": loss.item(), **log}], "weights": gradients}


# ---- what another engine sampled ------------------------------------------------------------------------------------


def sampled_elsewhere(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions as of another engine, which is nearly sure of a few tokens and does not know one."""
    g = torch.Generator().manual_seed(trainer.state.global_step)
    lengths = torch.randint(1, LENGTH + 1, (len(prompts),), generator=g).tolist()
    logps = [(-4.1 + 0.4 * torch.randn(n, generator=g)).tolist() for n in lengths]
    logps[0][0], logps[1][0] = float("nan"), -0.1
    return {
        "prompt_ids": [[11, 12]] * len(prompts), "logprobs": logps,
        "completion_ids": [torch.randint(10, VOCAB, (n,), generator=g).tolist() for n in lengths],
    }  # fmt: skip


RS = {"token_k1": (0.3, 3.0), "seq_mean_k3": 1.0}


def sampled_by(cls: Any, engine: Callable[..., Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer whose engine is this one; a rollout."""
    trainer = parity.make_trainer(partial(cls, rollout_func=engine), "qwen2", options)
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


# ---- kept ids --------------------------------------------------------------------------------------------------------


class EagerTrainer(trl.GRPOTrainer):
    """TRL's loss of log-probabilities over `kept` (B, T, V) bool, from logits by autograd."""

    kept: torch.Tensor

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **_):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = (logits / self.temperature).masked_fill(~self.kept, -torch.inf).log_softmax(-1)
        terms = torch.where(self.kept, logps.exp() * logps.masked_fill(~self.kept, 0.0), 0.0)
        return logps.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], -terms.sum(-1), None


def kept_rows(ids: list[torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
    """(B, T, V) bool of what travels with the rows."""
    kept = torch.zeros(*counts.shape, VOCAB, dtype=torch.bool)
    for row, numbers, found in zip(kept, counts, ids, strict=True):
        for token, own in zip(row, found.split(numbers.tolist()), strict=True):
            token[own.long()] = True
    return kept


def scored(trainer: Any, model: Any, output: dict[str, Any], kept: torch.Tensor) -> torch.Tensor:
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    return EagerTrainer._get_per_token_logps_and_entropies(
        SimpleNamespace(temperature=trainer.temperature, kept=kept), model, ids, mask, kept.shape[1]
    )[0]


class Watched(integration.FusedGRPOTrainer):
    """Compares what travels through shuffling and splitting with what the policy, which stands still, kept."""

    watched = 0

    def _compute_loss(self, model, inputs):
        kept = kept_rows(inputs["support_ids"], inputs["support_counts"])
        mask = inputs["completion_mask"].bool()
        full = scored(self, model, inputs, torch.ones_like(kept)).detach()
        own = scored(self, model, inputs, kept | ~mask[..., None]).detach()
        likely = torch.where(mask, inputs["support_counts"], 9) <= 10
        Watched.watched += int(likely.all() and bool(((own - full)[mask] > 0.1).all()))
        loss = super()._compute_loss(model, inputs)
        if "old_per_token_logps" in inputs:
            torch.testing.assert_close(inputs["old_per_token_logps"][mask], own[mask], rtol=0, atol=2e-6)
        return loss
