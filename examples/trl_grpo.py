"""GRPO with TRL and the fused loss: `python examples/trl_grpo.py [MODEL [STEPS [LEARNING_RATE]]]`.

One line differs from a script without this package: the import of the trainer. The task is to answer in eight words.
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig

from grpo_kernels.integrations.trl import FusedGRPOTrainer as GRPOTrainer

model, steps, rate = (*sys.argv[1:], *("HuggingFaceTB/SmolLM2-135M-Instruct", 50, 1e-6)[len(sys.argv) - 1 :])
questions = ["Why is the sky blue?", "What is a prime number?", "Who wrote Hamlet?", "How do plants grow?"]


def eight_words(completions, **_):
    return [-abs(len(text.split()) - 8) / 8 for text in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=eight_words,
    train_dataset=Dataset.from_dict({"prompt": questions * 16}),
    args=GRPOConfig(
        output_dir="build/trl_grpo",
        loss_type="dapo",
        num_generations=4,
        num_iterations=2,
        max_completion_length=32,
        learning_rate=float(rate),
        max_steps=int(steps),
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
    ),
)
trainer.train()
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
print(f"reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
