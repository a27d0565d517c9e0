"""`grpo-kernels train`: a complete GRPO run: data -> rollout -> rewards -> advantages -> loss -> step -> log.

arguments.py   the options, named as TRL names them; the command line and YAML
data.py        prompts; order.py: their order, a function of (seed, position)
arithmetic.py  the generated task of the default run, and the small model that it starts from
model.py       the policy, whose forward computes the loss or samples; the reference policy
rollout.py     completions: sampled by transformers or vLLM (vllm.py), saved, replayed
rewards/       reward functions, and the process that runs them; code in a sandbox
batch.py       advantages, masks and padding: from completions to the arguments of the loss
run.py         set-up; every mistake in the options is found here
train.py       the loop
progress.py    what changes from step to step, saved and restored; checkpoint.py: folders that are whole or absent
log.py         the numbers of a step; log.jsonl, samples.jsonl, progress bar, TensorBoard and others
monitor.py     failures in words; report.py: report.html; evaluate.py: pass@1, pass@k, majority@k
ranks.py       what processes tell each other; signals
commands.py    the commands train, demo, evaluate and report; dry_run.py: train --dry-run
"""

from importlib.util import find_spec

PACKAGES = ("transformers", "accelerate", "datasets", "tqdm", "yaml")


def missing_packages() -> list[str]:
    """Names of packages that the trainer needs and this environment lacks."""
    return [name for name in PACKAGES if find_spec(name) is None]
