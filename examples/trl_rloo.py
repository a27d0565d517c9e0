"""RLOO with TRL and fused log-probabilities: `python examples/trl_rloo.py [MODEL [STEPS [LEARNING_RATE]]]`.

`patch_trl` serves all of TRL's trainers; the rest is a script without this package. The task is an answer in
eight words.
"""

import sys

import torch
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer

from grpo_kernels.integrations.trl import patch_trl

patch_trl()
model, steps, rate = (*sys.argv[1:], *("HuggingFaceTB/SmolLM2-135M-Instruct", 50, 1e-6)[len(sys.argv) - 1 :])


def eight_words(completions, **_):
    return [-abs(len(text.split()) - 8) / 8 for text in completions]


trainer = RLOOTrainer(
    model=model,
    reward_funcs=eight_words,
    train_dataset=Dataset.from_dict({"prompt": ["Why is the sky blue?", "Who wrote Hamlet?"] * 32}),
    args=RLOOConfig(
        output_dir="build/trl_rloo",
        num_generations=4,
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
