"""Distillation with TRL and the fused divergence: `python examples/trl_distillation.py STUDENT TEACHER [STEPS]`.

One line differs from a script without this package: the import of the trainer.
"""

import sys

import torch
from datasets import Dataset
from trl import DistillationConfig

from grpo_kernels.integrations.trl_distillation import FusedDistillationTrainer as DistillationTrainer

student, teacher, *steps = sys.argv[1:]
trainer = DistillationTrainer(
    model=student,
    teacher_model=teacher,
    train_dataset=Dataset.from_dict({"prompt": ["Why is the sky blue?", "Who wrote Hamlet?"] * 32}),
    args=DistillationConfig(
        output_dir="build/trl_distillation",
        beta=1.0,  # reverse KL
        max_completion_length=32,
        learning_rate=1e-3,
        max_steps=int(*steps or [50]),
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
    ),
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"divergence per token: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
