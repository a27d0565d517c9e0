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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch

from grpo_kernels.benchmarks.machine import environment, now, read, write
from grpo_kernels.trainer.arguments import parse
from grpo_kernels.trainer.data import load_prompts
from grpo_kernels.trainer.evaluate import evaluate
from grpo_kernels.trainer.loop import Trainer
from grpo_kernels.trainer.rewards import Rewards
from grpo_kernels.trainer.rewards.answers import last_number
from grpo_kernels.trainer.run import Run
from grpo_kernels.trainer.sampling import eos_ids, generate
from grpo_kernels.trainer.smollm2 import smollm2
from grpo_kernels.trainer.tasks import TASKS

SPARSE, VLLM = "grpo-kernels train, sparse", "grpo-kernels train, vLLM"
CONTESTANTS = ("TRL", "TRL, FusedGRPOTrainer", "grpo-kernels train", SPARSE, VLLM)
SETTINGS = ("full-float32", "full-bfloat16", "lora-float32", "lora-bfloat16")
GROUP, BATCH, LENGTH = 8, 64, 24  # completions of a prompt, of a step; tokens of a completion
RATES = {"full": 2e-5, "lora": 5e-4}
THETA = 2**-12  # sparse_backward
EVALUATE_EVERY, HELD_OUT, SAMPLES = 2, 32, 1
PARTS = ("sampling", "rewards", "body", "head", "rest")
VLLM_OPTIONS = ["--use-vllm", "--vllm-enforce-eager", "--vllm-max-model-length=256"]
VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # GiB; the threads of torch


class Clock:
    """Seconds of the steps of a contestant, by part. `body`: forward and backward of the model below its head."""

    def __init__(self) -> None:
        self.total, self.parts = 0.0, dict.fromkeys(PARTS, 0.0)
        self.begin = self.forward = 0.0
        self.in_head = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] += time.perf_counter() - begin

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*given, **named)

        return call

    def watch(self, body: torch.nn.Module) -> None:
        """Divide the time of loss and backward: the head begins where hidden states are there, and ends in the backward
        where their gradient is. Shared prompts run through the body before their completions do."""

        def before(*_: Any) -> None:
            self.forward = time.perf_counter()

        def after(_: Any, __: Any, output: Any) -> None:
            hidden = output.last_hidden_state
            if hidden.requires_grad:
                self.in_head, self.head_begin = True, time.perf_counter()
                self.parts["body"] += self.head_begin - self.forward
                hidden.register_hook(self.head_ends)

        body.register_forward_pre_hook(before)
        body.register_forward_hook(after)

    def head_ends(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.in_head:
            self.in_head, self.body_begin = False, time.perf_counter()
            self.parts["head"] += self.body_begin - self.head_begin
        return gradient

    def backward_ends(self) -> None:
        self.parts["body"] += time.perf_counter() - self.body_begin

    def start(self) -> None:
        self.begin, self.parts = time.perf_counter(), dict.fromkeys(PARTS, 0.0)

    def stop(self) -> dict[str, float]:
        """The parts of a step."""
        seconds = time.perf_counter() - self.begin
        self.total += seconds
        self.parts["rest"] = seconds - sum(self.parts.values())
        return self.parts


class Contestant:
    """One run in this process. It tells its parent of each step and evaluation, and waits for its turn."""

    def __init__(self, name: str, model: str, setting: str, task: str, seed: int, steps: int, folder: Path) -> None:
        self.name, self.task, self.steps, self.clock = name, task, steps, Clock()
        self.kind, self.dtype = setting.split("-")
        self.pipe: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print
        self.rows = self.in_order(steps * BATCH // GROUP, seed)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.arguments = parse([
            f"--output-dir={folder / 'run'}", f"--model-name-or-path={model}", f"--dataset-name={prompts}",
            "--no-shuffle-dataset", "--reward-funcs=last_number", f"--num-generations={GROUP}",
            f"--per-device-train-batch-size={BATCH}", f"--max-completion-length={LENGTH}", f"--max-steps={steps}",
            f"--learning-rate={RATES[self.kind]}", "--lr-scheduler-type=constant", "--beta=0", "--loss-type=dapo",
            "--save-steps=0", f"--seed={seed}", "--use-cpu", "--share-prompts",
            *(["--bf16"] if self.dtype == "bfloat16" else []), *(["--use-peft"] if self.kind == "lora" else []),
            *([f'--loss-options={{"sparse_backward": {THETA}}}'] if name == SPARSE else []),
            *(VLLM_OPTIONS if name == VLLM else []),
        ])  # fmt: skip

    def in_order(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The prompts of a run. Each trainer would shuffle them in a way of its own, and an epoch that begins with hard
        ones costs several steps."""
        rows, order, found = TASKS[self.task]()[0], random.Random(seed), []
        while len(found) < count:
            found += order.sample(rows, len(rows))
        return found[:count]

    def tell(self, **record: Any) -> None:
        self.pipe.write(json.dumps(record) + "\n")
        self.pipe.flush()

    def turn(self) -> None:
        """Wait until the parent says go on; then the clock runs. The others get the memory that this one does not use:
        glibc would keep several GB."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.tell(waits=True)
        sys.stdin.readline()
        self.clock.start()

    def step(self, step: int, reward: float) -> None:
        parts = self.clock.stop()
        self.tell(step=step, clock=self.clock.total, reward=reward, seconds=dict(parts))

    def judge(self, lm: Any, tokenizer: Any, step: int) -> None:
        """Tell the reward of an evaluation, where one is due."""
        if step % EVALUATE_EVERY and step != self.steps:
            return
        prompts = load_prompts(self.task, tokenizer=tokenizer, split="test")[:HELD_OUT]
        ends = eos_ids(lm, tokenizer)

        def sample(prompts: list[list[int]], *, greedy: bool, seed: int) -> list[tuple[list[int], str]]:
            torch.manual_seed(seed)
            found = generate(lm, prompts, self.arguments, ends=ends, pad_id=tokenizer.pad_token_id, greedy=greedy)
            return [(s.ids, tokenizer.decode(s.ids, skip_special_tokens=True)) for s in found]

        training = lm.training
        lm.eval()
        with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
            found = evaluate(sample, prompts, Rewards([last_number]), num_samples=SAMPLES)
        lm.train(training)
        self.tell(evaluated=step, clock=self.clock.total, reward=found["reward"], greedy=found["greedy_reward"])

    def run(self) -> None:
        (self.run_trl if self.name in CONTESTANTS[:2] else self.run_trainer)()
        self.tell(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)

    def run_trainer(self) -> None:
        contestant, clock = self, self.clock

        class Timed(Trainer):
            def collect(self) -> None:
                contestant.turn()
                super().collect()
                clock.parts["sampling"], clock.parts["rewards"] = self.seconds["rollout"], self.seconds["rewards"]

            def update(self) -> None:
                reward = self.progress.rollout_numbers["reward"]
                super().update()
                contestant.step(self.progress.step, reward)

            def evaluate(self) -> None:
                contestant.judge(self.run.bare_policy.lm, self.sampler.tokenizer, self.progress.step)

        run = Run(self.arguments)
        base = run.bare_policy.lm
        clock.watch(getattr(base, "get_base_model", lambda: base)().model)
        backward = run.accelerator.backward
        run.accelerator.backward = lambda loss: (backward(loss), clock.backward_ends())
        Timed(run).train()
        run.close()

    def run_trl(self) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        from grpo_kernels.integrations.trl import FusedGRPOTrainer

        contestant, clock, a = self, self.clock, self.arguments
        tokenizer = AutoTokenizer.from_pretrained(a.model_name_or_path)

        class Turns(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                contestant.judge(trainer.model, tokenizer, 0)

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                contestant.turn()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                contestant.step(state.global_step, trainer._metrics["train"]["reward"][-1])
                contestant.judge(trainer.model, tokenizer, state.global_step)

        kind = FusedGRPOTrainer if self.name == CONTESTANTS[1] else GRPOTrainer
        lora = LoraConfig(r=a.lora_r, lora_alpha=a.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = kind(
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
        for name, part in (("_generate", "sampling"), ("_calculate_rewards", "rewards")):
            setattr(trainer, name, clock.timed(getattr(trainer, name), part))
        base = trainer.model
        clock.watch((base.get_base_model() if a.use_peft else base).model)
        backward = trainer.accelerator.backward

        def timed_backward(loss: Any, **named: Any) -> None:
            backward(loss, **named)
            clock.backward_ends()

        trainer.accelerator.backward = timed_backward
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
        """Whether it waits for another turn; it has ended otherwise."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            record = json.loads(line)
            if "waits" in record:
                return True
            if "step" in record:
                self.found["steps"].append(record)
            elif "evaluated" in record:
                self.found["evaluations"].append(record)
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


def run_round(pythons: dict[str, Path], setting: str, task: str, seed: int, steps: int) -> dict[str, Any]:
    """What each contestant told, by its name. `pythons`: by the same names."""
    words = ["--settings", setting, "--tasks", task, "--seeds", str(seed), "--steps", str(steps)]
    children = {name: Child(name, python, words) for name, python in pythons.items()}
    try:
        while waiting := [child for child in children.values() if child.running]:
            child = min(waiting, key=lambda child: child.clock)
            child.go_on()
            step, before = child.found["steps"][-1], child.found["evaluations"][-1]
            print(
                f"{setting}, seed {seed}, {child.found['command'][2]}: step {step['step']}, {step['clock'] / 60:.1f} "
                f"minutes, reward {step['reward']:.2f}, evaluated {before['reward']:.2f}", flush=True,
            )  # fmt: skip
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
    pythons = dict.fromkeys(chosen.contestants, Path(sys.executable)) | {VLLM: chosen.vllm_python}
    if chosen.vllm_python is None:
        print(f"{VLLM!r} takes no part: --vllm-python names no environment")
    contestants = [name for name in chosen.contestants if pythons[name] is not None]
    here = environment(torch.device("cpu"))
    document = read(chosen.output) if chosen.output.exists() else {"environment": here, "rounds": []}
    for seed in chosen.seeds:
        for task in chosen.tasks:
            for setting in chosen.settings:
                options = {"task": task, "setting": setting, "seed": seed}
                known = [found for found in document["rounds"] if options.items() <= found.items()]
                found = known[0] if known else options | {"date": now(), "contestants": {}}
                left = {name: pythons[name] for name in contestants if name not in found["contestants"]}
                found["contestants"] |= run_round(left, setting, task, seed, chosen.steps)
                document["rounds"] += [] if known else [found]
                write(chosen.output, document)


if __name__ == "__main__":
    main()
