"""TRL's DistillationTrainer with several teachers, each for the prompts that name it in the column `teacher_id`.

    python examples/trl_teachers.py STUDENT MATH_TEACHER CODE_TEACHER [STEPS]

TRL 1.16 has that column for teachers behind servers, by their likeliest ids. Here they are local and whole in each
process, and the divergence is over the whole vocabulary. A teacher runs on its own completions alone.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer

from grpo_kernels import Teacher, fused_distillation_loss
from grpo_kernels.distillation import divergence_of_beta
from grpo_kernels.integrations.transformers import fused_forward


def teacher_of_head(hidden, weight, ids, *, completion_mask, lm_head_bias, logit_scale, logit_softcap):
    return Teacher(hidden, weight, lm_head_bias, logit_scale, logit_softcap)


def divergence_of_head(hidden, weight, ids, **options):
    return fused_distillation_loss(hidden, weight, **options)


class SeveralTeachersTrainer(DistillationTrainer):
    """teachers: models by the values of `teacher_id`, with the student's ids. Texts alone, no images."""

    def __init__(self, *args, teachers, **options):
        super().__init__(*args, **options)
        for data in filter(None, (self.train_dataset, self.eval_dataset)):
            if unknown := {*data["teacher_id"]} - teachers.keys():
                raise ValueError(f"teacher_id holds {sorted(map(str, unknown))}; expected {sorted(teachers)}")
        self.names, device = list(teachers), self.accelerator.device
        self.teachers = [teacher.to(device).eval().requires_grad_(False) for teacher in teachers.values()]

    def _generate_and_score_completions(self, rows):
        batch, names = super()._generate_and_score_completions(rows), [row["teacher_id"] for row in rows]
        teacher_of = torch.tensor([self.names.index(name) for name in names], device=self.accelerator.device)
        return {**batch, "teacher_of": teacher_of}  # TRL shuffles and splits it with the rest

    def _compute_loss(self, student, batch, num_items_in_batch):
        ids, mask = batch["completion_ids"], batch["completion_mask"]
        inputs = {
            "input_ids": torch.cat([batch["prompt_ids"], ids], dim=1),
            "attention_mask": torch.cat([batch["prompt_mask"], mask], dim=1),
            "completion_ids": ids,
            "completion_mask": mask * batch.get("tool_mask", 1),
        }
        indices, teacher_of = batch["teacher_of"].unique(return_inverse=True)
        teachers = []
        for place, index in enumerate(indices.tolist()):
            own = {name: x[teacher_of == place] for name, x in inputs.items()}
            with torch.no_grad():
                teachers.append(fused_forward(self.teachers[index], loss=teacher_of_head, **own))
        out = fused_forward(
            student, loss=divergence_of_head, **inputs, teacher=teachers, teacher_of=teacher_of,
            normalizer=num_items_in_batch, temperature=self.temperature, **divergence_of_beta(self.beta),
        )  # fmt: skip
        return out.loss, out.entropy.sum(), inputs["completion_mask"].sum()


if __name__ == "__main__":
    student, math, code, *steps = sys.argv[1:]
    trainer = SeveralTeachersTrainer(
        model=student,
        teachers={name: AutoModelForCausalLM.from_pretrained(path) for name, path in (("math", math), ("code", code))},
        train_dataset=Dataset.from_dict(
            {"prompt": ["What is 2 + 3?", "Sort a list in Python."] * 32, "teacher_id": ["math", "code"] * 32}
        ),
        args=DistillationConfig(
            output_dir="build/trl_teachers",
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
