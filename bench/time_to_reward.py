"""How soon a chat model learns: TRL's GRPOTrainer, the same with FusedGRPOTrainer, `grpo-kernels train`, that with
sparse gradients, and that with vLLM's sampling.

    python bench/time_to_reward.py --output bench/results/time-to-reward.json [--settings full-bfloat16] [--seeds 0 1 2]

`--vllm-python build/vllm/bin/python` names an environment with vLLM (`make test-vllm` makes that one); the contestant
with vLLM takes part where one is named.

SmolLM2-135M-Instruct (`make demo-chat` installs it) learns a generated task from the same prompts in the same order,
with the same hyperparameters and seed. The contestants of a round take turns step by step: the one with the least time
on its clock goes next, so that none has the quiet hour of a shared machine. A clock stands still while the others run
and during evaluations, which are the same for all. Contestants that a round of the output has are not run again: a
stopped call goes on.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch

from grpo_kernels.benchmarks.machine import environment, now, read, write
from grpo_kernels.trainer.arguments import parse
from grpo_kernels.trainer.demo import smollm2
from grpo_kernels.trainer.loop import Trainer
from grpo_kernels.trainer.rewards.answers import last_number
from grpo_kernels.trainer.run import Run
from grpo_kernels.trainer.tasks import TASKS

OURS = "grpo-kernels train"
SPARSE, VLLM = f"{OURS}, sparse", f"{OURS}, vLLM"
CONTESTANTS = ("TRL", "TRL, FusedGRPOTrainer", OURS, SPARSE, VLLM)
SETTINGS = ("full-float32", "full-bfloat16", "lora-float32", "lora-bfloat16")
GROUP, BATCH, LENGTH = 8, 64, 24  # completions of a prompt, of a step; tokens of a completion
RATES = {"full": 2e-5, "lora": 5e-4}
EVALUATE_EVERY, HELD_OUT = 2, 32
OPTIONS = {
    SPARSE: [f"--sparse-backward={2**-12}"],
    VLLM: ["--use-vllm", "--vllm-enforce-eager", "--vllm-max-model-length=256"],
}
VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # GiB; the threads of torch


class Contestant:
    """One run in this process. It tells its parent of each step and evaluation, and waits for its turn."""

    def __init__(self, name: str, model: str, setting: str, task: str, seed: int, steps: int, folder: Path) -> None:
        self.name, self.steps = name, steps
        self.pipe: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print
        self.clock = self.begin = self.head = self.head_begin = 0.0
        # Each trainer would shuffle in its own way, and an epoch that begins with hard prompts costs several steps.
        rows, self.held_out = TASKS[task]()
        order, self.rows = random.Random(seed), []
        while len(self.rows) < steps * BATCH // GROUP:
            self.rows += order.sample(rows, len(rows))
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in self.rows[: steps * BATCH // GROUP]))
        kind, dtype = setting.split("-")
        self.arguments = parse([
            f"--output-dir={folder / 'run'}", f"--model-name-or-path={model}", f"--dataset-name={prompts}",
            "--no-shuffle-dataset", "--reward-funcs=last_number", f"--num-generations={GROUP}",
            f"--per-device-train-batch-size={BATCH}", f"--max-completion-length={LENGTH}", f"--max-steps={steps}",
            f"--learning-rate={RATES[kind]}", "--lr-scheduler-type=constant", "--beta=0", "--loss-type=dapo",
            "--save-steps=0", f"--seed={seed}", "--use-cpu", "--share-prompts",
            *(["--bf16"] if dtype == "bfloat16" else []), *(["--use-peft"] if kind == "lora" else []),
            *OPTIONS.get(name, []),
        ])  # fmt: skip

    def tell(self, **record: Any) -> None:
        self.pipe.write(json.dumps(record) + "\n")
        self.pipe.flush()

    def turn(self) -> None:
        """Waits until the parent says go on; then the clock runs. The others get the memory that this one does not use:
        glibc would keep several GB."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.tell(waits=True)
        sys.stdin.readline()
        self.begin, self.head = time.perf_counter(), 0.0

    def step(self, step: int, reward: float) -> None:
        seconds = time.perf_counter() - self.begin
        self.clock += seconds
        parts = {"head": self.head, "rest": seconds - self.head}
        self.tell(step=step, clock=self.clock, reward=reward, seconds=parts)

    def watch(self, body: torch.nn.Module) -> None:
        """Takes the time of the head: from where hidden states are there to where their gradient is."""

        def ends(gradient: torch.Tensor) -> None:
            self.head += time.perf_counter() - self.head_begin

        def begins(_: Any, __: Any, output: Any) -> None:
            if output.last_hidden_state.requires_grad:
                self.head_begin = time.perf_counter()
                output.last_hidden_state.register_hook(ends)

        body.register_forward_hook(begins)

    def judge(self, lm: Any, tokenizer: Any, step: int) -> None:
        """Tells the reward of an evaluation, where one is due."""
        if step % EVALUATE_EVERY and step != self.steps:
            return
        rows, template = self.held_out[:HELD_OUT], dict(add_generation_prompt=True, tokenize=False)
        texts = [tokenizer.apply_chat_template(row["prompt"], **template) for row in rows]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        options = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=LENGTH)
        training = lm.training
        lm.eval()
        with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16, enabled=self.arguments.bf16):
            torch.manual_seed(0)
            ids = lm.generate(**batch, **options, pad_token_id=tokenizer.pad_token_id)
        lm.train(training)
        completions = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        reward = fmean(last_number(completions, [row["answer"] for row in rows]))
        self.tell(evaluated=step, clock=self.clock, reward=reward)

    def run(self) -> None:
        (self.run_trainer if self.name.startswith(OURS) else self.run_trl)()
        self.tell(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)

    def run_trainer(self) -> None:
        contestant = self

        class Timed(Trainer):
            def collect(self) -> None:
                contestant.turn()
                super().collect()

            def update(self) -> None:
                reward = self.progress.rollout_numbers["reward"]
                super().update()
                contestant.step(self.progress.step, reward)

            def evaluate(self) -> None:
                contestant.judge(self.run.bare_policy.lm, self.sampler.tokenizer, self.progress.step)

        run = Run(self.arguments)
        base = run.bare_policy.lm
        self.watch(getattr(base, "get_base_model", lambda: base)().model)
        Timed(run).train()
        run.close()

    def run_trl(self) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        from grpo_kernels.integrations.trl import FusedGRPOTrainer

        contestant, a = self, self.arguments
        tokenizer = AutoTokenizer.from_pretrained(a.model_name_or_path)

        class Turns(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                contestant.judge(trainer.model, tokenizer, 0)

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                contestant.turn()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                contestant.step(state.global_step, trainer._metrics["train"]["reward"][-1])
                contestant.judge(trainer.model, tokenizer, state.global_step)

        lora = LoraConfig(r=a.lora_r, lora_alpha=a.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = (GRPOTrainer if self.name == "TRL" else FusedGRPOTrainer)(
            model=a.model_name_or_path, reward_funcs=last_number, processing_class=tokenizer, callbacks=[Turns()],
            train_dataset=Dataset.from_list(self.rows), peft_config=lora if a.use_peft else None,
            args=GRPOConfig(
                output_dir=a.output_dir, per_device_train_batch_size=BATCH, num_generations=GROUP,
                max_completion_length=LENGTH, max_steps=a.max_steps, learning_rate=a.learning_rate,
                lr_scheduler_type="constant", beta=0.0, loss_type="dapo", bf16=a.bf16, use_cpu=True, report_to="none",
                save_strategy="no", seed=a.seed, shuffle_dataset=False, gradient_checkpointing=False,
                model_init_kwargs={"dtype": "float32"}, logging_steps=1, disable_tqdm=True,
            ),
        )  # fmt: skip
        self.watch((trainer.model.get_base_model() if a.use_peft else trainer.model).model)
        trainer.train()


# --- a round: all contestants with one setting and one seed -----------------------------------------------------------


class Child:
    """A contestant's process, as its parent sees it. `found`: what it has told."""

    def __init__(self, name: str, python: Path, words: list[str]) -> None:
        words = ["--contestant", name, *words]
        self.found: dict[str, Any] = {"command": ["bench/time_to_reward.py", *words], "steps": [], "evaluations": []}
        # vLLM's environment does not have this package: it is found beside this file's folder.
        variables = os.environ | VLLM_VARIABLES | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self.process = subprocess.Popen(
            [python, __file__, *words, "--model", smollm2()], env=variables if name == VLLM else None,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.running = self.read()

    @property
    def clock(self) -> float:
        return self.found["steps"][-1]["clock"] if self.found["steps"] else 0.0

    def read(self) -> bool:
        """Returns whether it waits for another turn; it has ended otherwise."""
        assert self.process.stdout is not None
        for record in map(json.loads, self.process.stdout):
            if "waits" in record:
                return True
            if "step" in record or "evaluated" in record:
                self.found["steps" if "step" in record else "evaluations"].append(record)
            else:
                self.found |= record
        if status := self.process.wait():
            raise SystemExit(f"{' '.join(self.found['command'])} ended with {status}")
        return False

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.running = self.read()


def run_round(pythons: dict[str, Path], words: list[str]) -> dict[str, Any]:
    """Returns what each contestant told, by its name. `pythons`: by the same names."""
    children = {name: Child(name, python, words) for name, python in pythons.items()}
    try:
        while waiting := [name for name, child in children.items() if child.running]:
            name = min(waiting, key=lambda name: children[name].clock)
            children[name].go_on()
            found = children[name].found
            step, reward = found["steps"][-1], found["evaluations"][-1]["reward"]
            print(f"{name}: step {step['step']}, {step['clock'] / 60:.1f} minutes, evaluated {reward:.2f}", flush=True)
    finally:
        for child in children.values():
            child.process.kill()
    return {name: child.found for name, child in children.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add("--tasks", nargs="+", choices=[name for name in TASKS if name != "arithmetic"], default=["times-table"])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=14)
    add("--output", type=Path, default=Path("build/time-to-reward.json"))
    add("--vllm-python", type=Path, help=f"Python of an environment with vLLM, for {VLLM!r}")
    add("--contestant", choices=CONTESTANTS, help="be this one: for the processes that this script starts")
    add("--model", help="the model's folder: for the processes that this script starts")
    chosen = parser.parse_args()
    if chosen.contestant:
        options = chosen.model, chosen.settings[0], chosen.tasks[0], chosen.seeds[0], chosen.steps
        with TemporaryDirectory() as folder:
            Contestant(chosen.contestant, *options, Path(folder)).run()
        return
    pythons = dict.fromkeys(chosen.contestants, Path(sys.executable))
    if chosen.vllm_python:
        pythons[VLLM] = chosen.vllm_python
    elif pythons.pop(VLLM, None):
        print(f"{VLLM!r} takes no part: --vllm-python names no environment")
    here = environment(torch.device("cpu"))
    document = read(chosen.output) if chosen.output.exists() else {"environment": here, "rounds": []}
    for seed, task, setting in [(s, t, n) for s in chosen.seeds for t in chosen.tasks for n in chosen.settings]:
        options = {"task": task, "setting": setting, "seed": seed}
        known = [found for found in document["rounds"] if options.items() <= found.items()]
        found = known[0] if known else options | {"date": now(), "contestants": {}}
        words = ["--settings", setting, "--tasks", task, "--seeds", str(seed), "--steps", str(chosen.steps)]
        print(f"{setting}, {task}, seed {seed}", flush=True)
        left = {name: python for name, python in pythons.items() if name not in found["contestants"]}
        found["contestants"] |= run_round(left, words)
        document["rounds"] += [] if known else [found]
        write(chosen.output, document)


if __name__ == "__main__":
    main()
