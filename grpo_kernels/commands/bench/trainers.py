"""TRL's GRPOTrainer with and without this package: forward, loss and backward of a micro-batch, with a whole model."""

from __future__ import annotations

import math
import tempfile
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .baselines import Implementation, Result, Step
from .inputs import Inputs
from .models import END, make_model, make_tokenizer
from .peers import load

COMPLETION_TO_PROMPT = 4  # completions are this many times as long as prompts


def trainer_of(
    class_name: str, model: Any, tokenizer: Any, prompts: list[str], reward: Any, rollout: Any = None, **options: Any
) -> Any:
    """Returns TRL's "GRPOTrainer", or "FusedGRPOTrainer"; `options` are fields of TRL's GRPOConfig."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from ...integrations.trl import FusedGRPOTrainer

    return (FusedGRPOTrainer if class_name == "FusedGRPOTrainer" else GRPOTrainer)(
        model=model, args=GRPOConfig(output_dir=tempfile.mkdtemp(), report_to="none", bf16=False, **options),
        reward_funcs=reward, rollout_func=rollout, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )  # fmt: skip


def step_of(inputs: Inputs, mode: str, class_name: str, patched: bool = False) -> Step:
    """Returns the step of a trainer's micro-batch, on a GPU with gradient checkpointing, TRL's default. The model's
    gradients are allocated here, before the step's first call."""
    load("trl.trainer.grpo_trainer")
    from ...integrations.trl import patch_trl, unpatch_trl

    warnings.simplefilter("ignore")
    (rows, length), on_gpu = inputs.ids.shape, inputs.hidden.is_cuda
    trainer = trainer_of(
        class_name, make_model(inputs), make_tokenizer({}), ["x"] * rows, lambda **_: [0.0], loss_type="dapo",
        per_device_train_batch_size=rows, num_generations=rows, max_completion_length=length, use_cpu=not on_gpu,
        gradient_checkpointing=on_gpu,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.to(inputs.hidden.device).train()
    if on_gpu:  # as train() does
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})

    def compute(batch: dict[str, Tensor]) -> Tensor:
        (patch_trl if patched else unpatch_trl)()
        loss: Tensor = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        return loss.detach()

    batch = make_batch(inputs)
    compute({name: x[:, :4] if x.dim() == 2 else x for name, x in batch.items()})
    return lambda inputs: Result(compute(batch))


def make_batch(inputs: Inputs) -> dict[str, Tensor]:
    """Returns a micro-batch: random ids, old log-probabilities near the policy's, so that few ratios are clipped."""
    length, generator = inputs.ids.shape[1], torch.Generator().manual_seed(1)
    prompt_length, ids = math.ceil(length / COMPLETION_TO_PROMPT), inputs.ids.clamp(min=END + 1)
    noise = torch.randn(ids.shape, generator=generator).to(ids.device)
    return {
        "prompt_ids": ids[:, :prompt_length],
        "prompt_mask": inputs.mask[:, :prompt_length],
        "completion_ids": ids,
        "completion_mask": inputs.mask,
        "advantages": inputs.advantages,
        "old_per_token_logps": 0.1 * noise - math.log(len(inputs.weight)),
        "num_items_in_batch": inputs.mask.sum(),
    }


def _implementation(title: str, **options: Any) -> Implementation:
    """Returns a trainer's implementation, for mode "trainer"."""
    return Implementation(title, partial(step_of, **options), "none", modes=("trainer",))


TRAINERS = {
    "trl-trainer": _implementation("TRL's trainer", class_name="GRPOTrainer"),
    "ours-patch_trl": _implementation("TRL's trainer with patch_trl", class_name="GRPOTrainer", patched=True),
    "ours-trainer": _implementation("FusedGRPOTrainer", class_name="FusedGRPOTrainer"),
}
