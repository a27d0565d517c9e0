"""The run, from top to bottom: rollout -> rewards -> advantages -> loss -> step -> log, until max_steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean

import torch

from . import RunError
from .batch import (
    assign_advantages,
    assign_weights,
    denominators,
    groups_of,
    is_scored,
    loss_inputs,
    model_inputs,
    step_ends,
    without_gradient,
)
from .checkpoint import Progress, norm
from .data import take
from .evaluate import ACCURACIES, evaluate
from .files import write_json
from .log import pass_numbers, rollout_record, step_record
from .memory import advice_on_memory
from .ranks import Interrupted, whole
from .records import counted
from .report import write_report
from .rewards import RewardBatch
from .rewards.scoring import Failure
from .rollout import Completion, infer
from .run import Run
from .tasks import ARITHMETIC_MODEL

SAMPLES = 4  # completions of a rollout in samples.jsonl
KL_HORIZON = 10_000  # completions over which an adaptive beta doubles, about
REFERENCE_SHARE = 0.6  # of the policy in a move of the reference policy, as in TRL


class Trainer:
    """Progress through a run; `run` holds everything that does not change."""

    def __init__(self, run: Run):
        self.run, self.arguments, self.ranks, self.sampler = run, run.arguments, run.ranks, run.sampler
        self.policy, self.reference = run.policy, run.reference
        self.config = self.arguments.loss_config()
        self.progress = Progress(beta=self.arguments.beta) if run.checkpoint is None else run.restore()
        self.pad_id = self.sampler.tokenizer.pad_token_id
        self.rows_per_step = self.arguments.rows_per_step(self.ranks.count)
        self.started = time.perf_counter() - self.progress.seconds
        self.seconds: dict[str, float] = {}  # of the parts of a step
        self.ranks_without_rewards: set[int] = set()  # in the last rollout

    def train(self) -> int:
        """Makes all steps that are left; returns the exit status."""
        p, a, run = self.progress, self.arguments, self.run
        run.log.start(p.step, p.log_sizes)
        run.log.say(
            f"{a.model_name_or_path or ARITHMETIC_MODEL}, {counted(len(run.prompts), 'prompt')}, "
            f"{len(run.held_out):,} held out; {counted(a.max_steps, 'step')} of "
            f"{counted(self.rows_per_step, 'completion')}, {counted(self.ranks.count, 'process')}, "
            f"{run.accelerator.device}; output in {run.folder}"
        )
        if p.step:
            run.log.say(f"resumed at step {p.step} from {run.checkpoint}")
        with run.signals.noted():
            try:
                with advice_on_memory(lambda: run.log.phase_name):
                    self.evaluate()
                    while p.step < a.max_steps:
                        if not p.rollout:
                            self.collect()
                        self.update()
                        run.signals.check()
                        if a.save_steps and p.step % a.save_steps == 0 and p.step < a.max_steps:
                            run.save(p)
                        self.evaluate()
                    self.finish()
                return 0
            except Interrupted:
                run.save(p)
                run.log.say(f"stopped by a signal after step {p.step}; --resume-from-checkpoint auto goes on")
                return 128 + run.signals.received  # as shells have it: 130 after Ctrl-C

    def collect(self) -> None:
        """Samples the next rollout, scores it, and computes what its updates need."""
        a, p, run = self.arguments, self.progress, self.run
        begin = time.perf_counter()
        run.log.phase("sampling")
        self.seconds, p.rollout_numbers = {"rewards": 0.0}, {}
        rollout = self._sample()
        if p.rollout_index == 0 and a.is_given("step_delimiter") and all(c.steps is None for c in rollout):
            raise RunError(f"step_delimiter={a.step_delimiter!r} has no effect: no function gave rewards of steps")
        assign_advantages(rollout, self.config, a.num_generations)
        if a.distills_only:
            for c in rollout:
                c.advantage = torch.zeros(())
        if a.dynamic_sampling:
            for group in filter(without_gradient, groups_of(rollout, a.num_generations)):
                for c in group:
                    c.dropped = True
        run.log.phase("updates")
        self._score_under_policies(rollout)
        if a.corrects:
            assign_weights(rollout, a, run.accelerator.device)
        p.rollout, p.used = rollout, 0
        self.seconds["rollout"] = time.perf_counter() - begin - self.seconds["rewards"]
        p.rollout_numbers |= rollout_record(rollout, a.num_generations)
        if a.distills_only:  # rewards are no signal
            for name in ("zero_gradient_groups", *(() if run.rewards else ("unscored",))):
                p.rollout_numbers.pop(name)
        self._log_samples()

    def _sample(self) -> list[Completion]:
        """Returns num_generations scored completions of each of the next prompts, from all ranks."""
        a, p, prompts = self.arguments, self.progress, self.run.prompts
        num_groups = a.rows_per_rollout(self.ranks.count) // a.num_generations
        chosen = take(len(prompts), p.cursor, num_groups, a.seed)
        groups = [(i, prompts[index]) for i, index in enumerate(chosen) for _ in range(a.num_generations)]
        local = self.ranks.share(groups)
        ids = [prompt.ids for _, prompt in local]
        sampled = self.sampler.sample(ids, stream=f"{a.seed} {p.rollout_index}", step=p.step)
        completions = [
            Completion(
                i, prompt.prompt, prompt.ids, prompt.columns, *s[:2], logps=s.logps, kept=s.kept, teacher=prompt.teacher
            )
            for (i, prompt), s in zip(local, sampled, strict=True)
        ]
        self._score(completions)
        p.cursor += num_groups  # which stays where it is if sampling is cut short
        return self.ranks.gather(completions)

    def _score(self, rows: Sequence[Completion]) -> None:
        """Sets the rewards of this rank's completions."""
        begin, rewards = time.perf_counter(), self.run.rewards
        self.run.log.phase("rewards")
        if rewards is None:  # the loss is the divergence to a teacher
            return
        with self.ranks.raise_on_all():
            batch = rewards.score(
                prompts=[c.prompt for c in rows],
                completions=[self.sampler.text(c.prompt, c.ids) for c in rows],
                completion_ids=[c.ids for c in rows],
                columns={name: [c.columns[name] for c in rows] for name in rows[0].columns},
                step=self.progress.step,
            )
            for i, c in enumerate(rows):
                self._set_reward(c, batch, i)
        told = self.ranks.gather([(batch.failures, batch.fatal, batch.metrics, batch.seconds)])
        failures, fatal, metrics, seconds = zip(*told, strict=True)
        self._check_rewards(fatal)
        if any(failures):
            first, count = next(filter(None, failures))[0], sum(len({f.row for f in part}) for part in failures)
            self.run.log.say(f"{counted(count, 'completion')} unscored, the first by {first.name}: {first.message}")
        self.seconds["rewards"] = time.perf_counter() - begin
        numbers = self.progress.rollout_numbers
        for name in dict.fromkeys(name for part in metrics for name in part):
            numbers[f"metrics/{name}"] = fmean(part[name] for part in metrics if name in part)
        numbers["slowest_reward"] = max(seconds[0], key=seconds[0].get)

    def _check_rewards(self, fatal: Sequence[Failure | None]) -> None:
        """Raises RunError where no rank has rewards, or one has had none in two rollouts: what it lacks (a package, a
        server) will not come. A single rollout may be a prompt that no completion is scored for. fatal: by rank, the
        failure of a function for all of its completions."""
        failures = {rank: failure for rank, failure in enumerate(fatal) if failure is not None}
        again, self.ranks_without_rewards = failures.keys() & self.ranks_without_rewards, set(failures)
        for rank in sorted(again) or failures:
            where = f"for every completion of step {self.progress.step + 1}"
            if len(failures) < len(fatal):
                where += f" on rank {rank} of {len(fatal)}{', as in the rollout before' if again else ''}"
            sentence = (
                f"the reward {failures[rank].name} failed {where}; its own traceback:\n{failures[rank].traceback}"
            )
            if again or len(failures) == len(fatal):
                raise RunError(sentence)
            self.run.log.say(sentence)

    def _set_reward(self, c: Completion, batch: RewardBatch, index: int) -> None:
        a = self.arguments
        c.rewards = {name: values[index].item() for name, values in batch.by_name.items()}
        c.reward = batch.total[index].item()
        c.extra = {name: values[index] for name, values in batch.extra.items()}
        if batch.steps is not None and not math.isnan(c.reward):
            c.step_ends = step_ends(c.ids, self.sampler.tokenizer, a.step_delimiter)
            c.steps = batch.steps[index] or [0.0] * (len(c.step_ends) - 1) + [c.reward]

    def _score_under_policies(self, rollout: list[Completion]) -> None:
        """Sets old_logps and ref_logps, by the passes and in the shapes of the updates: equal weights, equal bits."""
        wants_old = self.arguments.steps_per_rollout > 1 or self.arguments.corrects
        self.policy.train(self.arguments.gradient_checkpointing)
        if wants_old:
            self._set_logps(rollout, "old_logps")
        if self.reference is not None:
            with self.reference.active():
                self._set_logps(rollout, "ref_logps")

    def _set_logps(self, rollout: list[Completion], name: str) -> None:
        options = self.arguments.scoring_options()
        for rows in groups_of(rollout, self.rows_per_step):
            local_logps = []
            for part in self._passes(rows):
                inputs = model_inputs(part, self.arguments, self.pad_id, self.run.accelerator.device)
                logps = infer(self.policy, "logps", **inputs, **options).float().cpu()
                local_logps += [row[: len(c.ids)].clone() for row, c in zip(logps, part, strict=True)]
            for c, values in zip(rows, self.ranks.gather(local_logps), strict=True):
                setattr(c, name, values)

    def _passes(self, rows: list[Completion]) -> list[list[Completion]]:
        """This rank's part of an optimizer step, one list per forward and backward pass."""
        return groups_of(self.ranks.share(rows), self.arguments.per_device_train_batch_size)

    def _log_samples(self) -> None:
        p = self.progress
        for c in p.rollout[:: -(-len(p.rollout) // SAMPLES)]:
            assert c.advantage is not None
            self.run.log.sample({
                "step": p.step + 1, "prompt": c.prompt, "completion": self.sampler.text("", c.ids),
                "tokens": len(c.ids), "reward": c.reward, "advantage": c.advantage.float().mean().item(),
                "rewards": c.rewards, **({"extra": c.extra} if c.extra else {}),
            })  # fmt: skip

    def update(self) -> None:
        """Makes one optimizer step on a part of the rollout."""
        a, p, run = self.arguments, self.progress, self.run
        begin = time.perf_counter()
        run.log.phase("updates")
        first = p.used * self.rows_per_step % len(p.rollout)
        rows = p.rollout[first : first + self.rows_per_step]
        record = step_record(self._backward(rows), self.ranks, first=p.used == 0)
        grad_norm = self._clip()
        run.check_finite(f"step {p.step + 1}:", {"the loss": record["loss"], "the gradient norm": grad_norm})
        rate = run.optimizer.param_groups[0]["lr"]
        size = min(grad_norm, a.max_grad_norm or math.inf) / math.sqrt(sum(p.numel() for p in run.trained()))
        eps = run.optimizer.param_groups[0]["eps"]
        relative = {} if rate and not grad_norm else {"relative_step": size / max(size + eps, 1e-300) if rate else 0.0}
        run.optimizer.step()
        run.scheduler.step()
        run.check_finite(f"step {p.step + 1} leaves", {"weights whose norm": norm(run.trained())})
        tokens = sum(len(c.ids) for c in rows if is_scored(c, a))
        p.step, p.used, p.num_tokens = p.step + 1, p.used + 1, p.num_tokens + tokens
        record = {
            "step": p.step, "rollout": p.rollout_index, "epoch": p.cursor / len(run.prompts),
            "num_tokens": p.num_tokens, "learning_rate": rate, "grad_norm": grad_norm, **relative,
            **({"beta": p.beta} if self.reference is not None else {}), **record, **p.rollout_numbers,
        }  # fmt: skip
        self._move_reference(record.get("kl"), len(rows))
        if p.used == a.steps_per_rollout:
            p.rollout, p.rollout_index = [], p.rollout_index + 1
        self.seconds["update"] = time.perf_counter() - begin
        record["tokens_per_second"] = tokens / max(sum(self.seconds.values()), 1e-9)
        record |= {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        record["seconds"] = p.seconds = time.perf_counter() - self.started
        self.seconds = {}
        run.log.record(record)

    @torch.enable_grad()  # whatever a reward function has set
    def _backward(self, rows: list[Completion]) -> list[dict[str, float]]:
        """Gradients of one step. Denominators are those of all its rows: the split into passes changes nothing."""
        a, p, run = self.arguments, self.progress, self.run
        config = self.config if a.kl_target is None else dataclasses.replace(self.config, beta=p.beta)
        count, tokens = denominators(rows, config, a)
        extra = {"entropy_normalizer": tokens / self.ranks.count} if config.has_entropy_bonus else {}
        run.optimizer.zero_grad()
        self.policy.train(a.gradient_checkpointing)  # eval() otherwise: no dropout, no router noise
        numbers, passes = [], self._passes(rows)
        for part in passes:
            inputs = model_inputs(part, a, self.pad_id, run.accelerator.device)
            inputs |= loss_inputs(part, run.accelerator.device)
            if run.teachers is not None:
                with run.accelerator.autocast():
                    inputs |= run.teachers(inputs, [c.teacher for c in part])
            with contextlib.nullcontext() if part is passes[-1] else run.accelerator.no_sync(self.policy):
                # DDP and FSDP2 average over the ranks.
                out = self.policy("loss", **inputs, config=config, normalizer=count / self.ranks.count, **extra)
                run.accelerator.backward(out.loss)
            numbers.append(pass_numbers(out, inputs))
        return numbers

    def _clip(self) -> float:
        """Scales gradients down to max_grad_norm; returns the norm before that."""
        norm = self.run.accelerator.clip_grad_norm_(self.run.trained(), self.arguments.max_grad_norm or math.inf)
        return float(whole(norm))

    def _move_reference(self, kl: float | None, completions: int) -> None:
        """Checks that the KL starts at 0; adapts beta (arXiv:1909.08593, section 2.2); moves the reference policy."""
        a, p = self.arguments, self.progress
        if self.reference is None:
            return
        if kl is not None:  # of a step with scored tokens
            if p.step == 1 and abs(kl) > 1e-3:
                raise RunError(f"the KL to the reference policy is {kl} before the first step; expected 0")
            if a.kl_target is not None:
                error = min(max(kl / a.kl_target - 1.0, -0.2), 0.2)
                p.beta *= 1.0 + error * completions / KL_HORIZON
        if a.ref_model_sync_steps and p.step % a.ref_model_sync_steps == 0:
            self.reference.move(REFERENCE_SHARE)

    def evaluate(self) -> None:
        """Scores held-out completions before, after, and every eval_steps steps, but not again after a resume."""
        a, p, run = self.arguments, self.progress, self.run
        due = p.step in (0, a.max_steps) or (a.eval_steps and p.step % a.eval_steps == 0)
        if not due or p.evaluated_at == p.step or not run.held_out or run.rewards is None:
            return
        run.log.phase("evaluation")
        evaluation = evaluate(
            partial(self.sampler.for_evaluation, step=p.step), run.held_out,
            run.rewards, num_samples=a.eval_num_samples, step=p.step, correct_at=a.correct_at,
        )  # fmt: skip
        p.evaluated_at = p.step
        if a.correct_at is None and not p.pass_at_1 and any(x is not None for x in p.held_out_reward.values()):
            for name in ACCURACIES:  # earlier rewards were no verdicts, so that 0 or 1 throughout is none now
                evaluation.pop(name, None)
        shown = {
            "reward": evaluation["reward"],
            "pass@1": evaluation.get("pass_at_1"),
            "greedy": evaluation.get("greedy"),
        }
        when = "before" if p.step == 0 else "after"
        p.held_out_reward = {**p.held_out_reward, when: shown["reward"]}
        # Rewards that were all 0 at first have said nothing, where later ones do not say what is correct.
        p.pass_at_1 = {} if shown["pass@1"] is None else {**p.pass_at_1, when: shown["pass@1"]}
        run.log.record({"step": p.step, "evaluation": evaluation})
        if run.accelerator.is_main_process:
            write_report(run.folder)
        known = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if value is not None)
        run.log.say(f"step {p.step}: held-out {known or 'completions were not scored'}")

    def finish(self) -> None:
        """Writes the last checkpoint, the model, summary.json and the report."""
        p, run = self.progress, self.run
        run.save(p)
        run.save_model(run.folder / "model")
        summary = {
            **{f"{name}_{when}": getattr(p, name).get(when) for name in ("held_out_reward", "pass_at_1")
               for when in ("before", "after")},
            "steps": p.step, "seconds": time.perf_counter() - self.started, "tokens": p.num_tokens,
            "options": run.options,
        }  # fmt: skip
        if run.accelerator.is_main_process:
            write_json(run.folder / "summary.json", summary)
            write_report(run.folder)
        run.accelerator.wait_for_everyone()
        run.log.say(f"{run.folder}: model, summary.json and report.html after {counted(p.step, 'step')}")
