"""Your own task, here "countdown" of reasoning-gym (pip install reasoning-gym): a JSONL and a reward function.

python examples/countdown.py countdown.jsonl
PYTHONPATH=examples grpo-kernels train --model-name-or-path MODEL --dataset-name countdown.jsonl \
    --reward-funcs countdown:solved
"""

import json
import re
import sys

import reasoning_gym

# reasoning-gym hands answers to sympy's parser, which runs them as Python: nothing but arithmetic may come that far,
# and no powers, which may take forever.
ARITHMETIC = re.compile(r"(?!.*\*\*)[0-9+\-*/() ]{1,100}")


def write_tasks(path, size=1000, seed=0):
    """A row for each task: `prompt`, and columns that the reward function gets by their names."""
    tasks = reasoning_gym.create_dataset("countdown", size=size, seed=seed, min_numbers=3, max_numbers=4)
    with open(path, "w", encoding="utf-8") as file:
        for task in tasks:
            messages = [{"role": "user", "content": task["question"]}]
            file.write(json.dumps({"prompt": messages, "metadata": task["metadata"]}) + "\n")


def solved(completions, metadata, **_):
    """1 for a right expression of all the numbers, 0.05 for another one of arithmetic, 0 for anything else."""
    score = reasoning_gym.get_score_answer_fn("countdown")
    answers = [completion[-1]["content"].strip() for completion in completions]
    pairs = zip(answers, metadata, strict=True)
    return [score(answer, {"metadata": m}) if ARITHMETIC.fullmatch(answer) else 0.0 for answer, m in pairs]


if __name__ == "__main__":
    write_tasks(*sys.argv[1:2])
