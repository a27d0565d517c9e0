"""Set-up: everything that a run needs and that does not change. What is wrong is said here, before the first step."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from transformers import get_scheduler

from . import RunError, reason_of
from .adamw import check_state_of, make_optimizer
from .arguments import TrainArguments, to_json
from .batch import model_inputs
from .checkpoint import (
    CONFIG,
    RUN,
    STATE,
    Progress,
    bytes_of_checkpoint,
    check_room,
    check_same_start,
    check_state,
    claim_folder,
    fingerprint_of_weights,
    norm,
    prune,
    read_checkpoint,
)
from .data import Prompt, fingerprint, load_prompts
from .decoding import choose_decoder
from .files import FolderLock, new_folder, remove_leftovers, write_atomically, write_json
from .log import RunLog
from .memory import advice_on_memory
from .mismatch import check_sampler, fix_rotary
from .model import Policy, ReferencePolicy, load_model, load_tokenizer, save_model
from .ranks import Ranks, Signals, forget_earlier_run, init_trackers, make_accelerator
from .rewards import Rewards
from .rollout import Completion, Sampler, infer
from .sampling import eos_ids
from .tasks import ARITHMETIC
from .teachers import OPTION, Teachers, check_ids, with_teachers
from .vllm import VLLM


class Given(NamedTuple):
    """What `train` has as objects. data: rows by the names that stand for them; rewards: in place of reward_funcs."""

    data: dict[str, Any]
    rewards: Sequence[Any] | None = None
    tokenizer: Any = None
    model: Any = None


NOTHING = Given({})


@dataclass
class Run:
    """The parts of a run that its steps do not replace, made by `open_run`.

    options: the arguments as files record them. lock: of the folder, on the first rank. checkpoint: the one to go on
    from. inputs: fingerprints of what a checkpoint does not hold, by "option=value". policy and optimizer: as
    the accelerator prepared them. probe: inputs of a single token, whose log-probability tells whether they are sound.
    """

    arguments: TrainArguments
    options: dict[str, Any]
    ranks: Ranks
    accelerator: Accelerator
    folder: Path
    lock: FolderLock | None
    checkpoint: Path | None
    inputs: dict[str, str]
    tokenizer: Any
    prompts: list[Prompt]
    held_out: list[Prompt]
    rewards: Rewards | None
    policy: Any
    bare_policy: Policy
    optimizer: Any
    scheduler: Any
    teachers: Teachers | None
    reference: ReferencePolicy | None
    probe: dict[str, Any]
    signals: Signals
    sampler: Sampler
    log: RunLog

    def trained(self) -> list[torch.Tensor]:
        """Returns the parameters that steps change."""
        return [p for p in self.policy.parameters() if p.requires_grad]

    def check_sound(self, step: int) -> None:
        """Raises RunError where what is to be saved is not finite; every rank calls it, and all raise.

        NaN in the weights ends the step that leaves it, see `Trainer.update`; what is infinite in Adam's moments, or in
        logits of weights that are finite, shows in no later number of the run.
        """
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        reference = () if self.reference is None else (copy for _, copy in self.reference.pairs.values())
        numbers = {
            "the norm of the weights": norm(self.trained()),
            "the norm of the optimizer's state": norm(x for x in moments if x.dim()),
            "the norm of the reference policy": norm(reference),
            "a log-probability under the policy": logp_of_probe(self.policy, self.probe, self.arguments),
        }
        self.check_finite(f"after step {step}", numbers)

    def check_finite(self, where: str, numbers: dict[str, float]) -> None:
        """Raises RunError, on all ranks, where a number is not finite."""
        wrong = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
        with self.ranks.raise_on_all():
            if wrong:
                words = f"{where} {', '.join(wrong)}"
                raise RunError(f"{words}; the run ends here, and its checkpoints are those of earlier steps")

    def model_state(self) -> dict[str, torch.Tensor]:
        """Returns whole parameters; every rank has to ask."""
        state = self.accelerator.get_state_dict(self.policy)
        return {name.removeprefix("lm."): tensor for name, tensor in state.items()}

    def write_model(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        """Writes model and tokenizer in transformers' format."""
        save_model(self.bare_policy.lm, folder, state)
        self.tokenizer.save_pretrained(folder)

    def save_model(self, folder: Path) -> None:
        """Writes the model alone, atomically."""
        state = self.model_state()
        with self.ranks.raise_on_all():
            if self.accelerator.is_main_process:
                write_atomically(folder, lambda partial: self.write_model(partial, state))

    def save(self, progress: Progress) -> None:
        """Writes checkpoint-STEP, unless it would be of no use; every rank calls it, the first one writes, and all
        raise where that fails."""
        self.log.phase("saving")
        self.check_sound(progress.step)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, progress.log_sizes = self.model_state(), self.log.sizes()
        state = {
            # torch makes a step with gradients of 0 where there was none, which AdamW would count.
            "optimizer": get_optimizer_state_dict(self.bare_policy, self.optimizer.optimizer, options=whole)
            if progress.step
            else None,
            "scheduler": self.scheduler.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "progress": {name: value for name, value in vars(progress).items() if name != "rollout"},
            # Prompts, columns and what functions gave to log_extra have done their work: rewards are known.
            "rollout": [vars(replace(c, prompt="", columns={}, extra={})) for c in progress.rollout],
            "inputs": self.inputs,
            "environment": _environment(),
        }

        def fill(folder: Path) -> None:
            self.write_model(folder, weights)
            torch.save(state, folder / STATE)
            write_json(folder / RUN, self.options)

        with self.ranks.raise_on_all():
            if self.accelerator.is_main_process:
                write_atomically(self.folder / f"checkpoint-{progress.step}", fill)
                prune(self.folder, self.arguments.save_total_limit, progress.step)

    def restore(self) -> Progress:
        """Returns the progress of `self.checkpoint`, and loads its optimizer, scheduler and reference policy.

        The weights were read with the model. Raises RunError where they do not fit it.
        """
        folder = self.checkpoint
        assert folder is not None
        state, progress = read_checkpoint(folder)
        try:
            for name, now in _environment().items():
                if (written := state["environment"].get(name)) != now:
                    print(f"{folder} was written with {name}={written}, now {now}: results may differ", file=sys.stderr)
            if state["optimizer"] is not None:
                options = StateDictOptions(full_state_dict=True, strict=False)  # without gradients there is no state
                set_optimizer_state_dict(
                    self.bare_policy, self.optimizer.optimizer, state["optimizer"], options=options
                )
                check_state_of(self.optimizer)
            self.scheduler.load_state_dict(state["scheduler"])
            if self.reference is not None:
                self.reference.load_state_dict(state["reference"])
        except Exception as error:  # of many types: the checkpoint is data
            advice = f"a new run may begin with model_name_or_path={folder}"
            raise RunError(f"{folder}/{STATE} does not fit the model: {reason_of(error)}; {advice}") from error
        return progress

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
        self.log.close()
        if self.lock is not None:
            self.lock.release()
        # torch 2.13: where a thread of gloo has not yet let go of the last message, taking the process group down waits
        # for that thread, which waits for Python. Without this pause one run in ten of two processes never ends.
        if self.ranks.count > 1:
            time.sleep(0.2)
        if self.sampler.vllm is not None:
            self.sampler.vllm.close()
        self.accelerator.end_training()


def open_run(a: TrainArguments, objects: Given = NOTHING) -> Run:
    """Opens a run: makes all that its steps need.

    The order: the options and the processes; the folder, locked before anything in it is read or changed; the model and
    the data, compared with those of the checkpoint; the rewards; vLLM, which takes its memory before the policy does;
    the policy and all that needs it prepared; the first files at last. Raises ValueError or TypeError, one sentence,
    with nothing overwritten.
    """
    forget_earlier_run()
    ranks = Ranks(use_cpu=a.use_cpu)
    with ranks.raise_on_all():  # of a folder or a package that one machine lacks, too
        a.check(ranks.count)
    options = to_json(a, ranks.count)
    folder = Path(a.output_dir).absolute()  # a reward function may change the working directory
    accelerator = make_accelerator(a)
    lock = lock_output(folder, ranks)
    with ranks.raise_on_all():
        checkpoint = claim_folder(folder, a, ranks.count)
        source = a.model_name_or_path or make_start_model(folder, a, ranks)
    check_same_start(folder, checkpoint, None if a.model_name_or_path else Path(source), ranks)
    with ranks.raise_on_all():
        tokenizer = load_tokenizer(getattr(objects.model, "name_or_path", source), a, objects.tokenizer)
        lm = load_model(source, a, checkpoint, objects.model)
        vocab_size = lm.get_input_embeddings().weight.shape[0]
        check_ids(a, tokenizer)
        prompts = with_teachers(load_data(a, tokenizer, lm, objects, held_out=False), a)
        held_out = load_data(a, tokenizer, lm, objects, held_out=True)
    inputs = {f"dataset_name={a.dataset_name or ARITHMETIC}": fingerprint(prompts)}
    frozen = {f"model_name_or_path={a.model_name_or_path or ARITHMETIC}": lm} if a.use_peft else {}
    inputs |= check_inputs(inputs, frozen, checkpoint, a, ranks)
    with ranks.raise_on_all():
        rewards = make_rewards(a, tokenizer, prompts, held_out, objects)
    longest = longest_row(a, [*prompts, *held_out])
    fix_rotary(lm, longest)
    ends = eos_ids(lm, tokenizer)
    policy: Any = Policy(lm, eager=a.loss == "eager", share_prompts=a.share_prompts)
    vllm = VLLM(lm.name_or_path if a.use_peft else source, a, lm, longest) if a.use_vllm else None
    with advice_on_memory(lambda: "set-up"):
        policy, optimizer = accelerator.prepare(policy, make_optimizer(policy.parameters(), a))
        bare_policy = accelerator.unwrap_model(policy)
        scheduler = make_scheduler(optimizer, a, ranks)
        probe = make_probe(prompts[0], a, tokenizer, accelerator.device)
        check_logps(policy, probe, a)
        teachers = None
        if a.teacher_model_name_or_path:
            teachers = Teachers(a, accelerator.device, vocab_size)
            if teachers.on_host and ranks.index == 0:
                count = f"{len(teachers.on_host)} of {len(teachers.models)} teachers"
                print(f"{count} stay in host memory and take turns on {accelerator.device}", file=sys.stderr)
            frozen = {f"{OPTION}={path}": teacher for path, teacher in teachers.models.items()}
            inputs |= check_inputs(inputs, frozen, checkpoint, a, ranks)
            for teacher in teachers.models.values():
                fix_rotary(teacher, longest)
            teachers.check(probe)
        if vllm is None:
            choose_decoder(policy, ranks, a)
        signals = Signals(ranks)
        sampler = Sampler(policy, tokenizer, a, ends, ranks, signals, progress=lambda *_: None, vllm=vllm)
        check_sampler(sampler, [prompt.ids for prompt in prompts])
        reference = ReferencePolicy(bare_policy) if a.beta else None
    with ranks.raise_on_all():
        if ranks.index == 0:
            try_to_save(bare_policy.lm, tokenizer, folder, a)
            if not a.dry_run:  # whose folder is another one
                check_room(folder, bytes_of_checkpoint(policy, a))
        if not a.dry_run:
            init_trackers(accelerator, a, options)
        if ranks.index == 0:
            write_json(folder / CONFIG, options)
    log = RunLog(folder, accelerator, a)
    sampler.progress = log.part
    return Run(
        a, options, ranks, accelerator, folder, lock, checkpoint, inputs, tokenizer, prompts, held_out, rewards, policy,
        bare_policy, optimizer, scheduler, teachers, reference, probe, signals, sampler, log,
    )  # fmt: skip


def lock_output(folder: Path, ranks: Ranks) -> FolderLock | None:
    """Locks the folder, on the first rank, and removes what killed runs left in it."""
    with ranks.raise_on_all():
        if ranks.index:
            return None
        lock = FolderLock(folder)
        remove_leftovers(folder)
        return lock


def make_start_model(folder: Path, a: TrainArguments, ranks: Ranks) -> str:
    """Returns the folder of the arithmetic model that a run without a model begins with; the first rank makes it."""
    path = folder / f"start-model-{a.seed}"
    if ranks.index == 0 and not path.exists():
        from .arithmetic import start_model

        start_model(path, seed=a.seed, quiet=a.dry_run)
    return str(path)


def check_inputs(
    inputs: dict[str, str], frozen: dict[str, Any], checkpoint: Path | None, a: TrainArguments, ranks: Ranks
) -> dict[str, str]:
    """Returns fingerprints of frozen models, by "option=value" that names them; only the first rank, which makes them,
    needs to hold the models whole. Raises RunError where these or `inputs` are not what the checkpoint was written
    with."""
    with ranks.raise_on_all():
        if ranks.index:
            return {}
        weights = {option: fingerprint_of_weights(lm) for option, lm in frozen.items()}
        if checkpoint is not None:
            check_state(checkpoint, a, inputs | weights)
        return weights


def make_scheduler(optimizer: Any, a: TrainArguments, ranks: Ranks) -> Any:
    """Returns the schedule of the learning rate; says where it ends before the warm-up does."""
    if a.warmup_steps > a.max_steps and ranks.index == 0:
        words = f"warmup_steps={a.warmup_steps} is beyond max_steps={a.max_steps}"
        print(f"{words}: learning_rate is not reached", file=sys.stderr)
    return get_scheduler(a.lr_scheduler_type, optimizer, a.warmup_steps, a.max_steps)


def make_probe(prompt: Prompt, a: TrainArguments, tokenizer: Any, device: torch.device) -> dict[str, Any]:
    """Returns model inputs of the last token of a prompt, once more after it."""
    completion = Completion(0, prompt.prompt, prompt.ids, {}, prompt.ids[-1:], ended=True)
    return model_inputs([completion], a, tokenizer.pad_token_id, device)


def logp_of_probe(policy: Any, probe: dict[str, Any], a: TrainArguments) -> float:
    """Returns the log-probability of the probe's token, in nats; every rank calls it."""
    return float(infer(policy, "logps", **probe, **a.scoring_options()))


def check_logps(policy: Any, probe: dict[str, Any], a: TrainArguments) -> None:
    """Raises ValueError for a model whose logits the loss does not understand, and for weights that are broken: before
    the first rollout, which may take long, and where the policy is prepared, since parameters are whole in its forward
    alone."""
    try:
        if not math.isfinite(logp := logp_of_probe(policy, probe, a)):
            raise ValueError(f"the log-probabilities of its tokens are {logp}; expected weights that are finite")
    except (ValueError, TypeError) as error:
        raise ValueError(f"model_name_or_path={a.model_name_or_path}: {error}") from error


def try_to_save(lm: Any, tokenizer: Any, folder: Path, a: TrainArguments) -> None:
    """Raises ValueError where model or tokenizer cannot be saved."""
    config = getattr(lm, "generation_config", None)
    if config is not None:
        try:
            config.validate(strict=True)
        except ValueError:  # of a temperature, say, which generate() passes over
            config.do_sample = True
            print("generation_config has options of sampling without do_sample: it gets do_sample", file=sys.stderr)
    try:
        with new_folder(folder / "trial") as trial:
            if not a.use_peft:  # PEFT saves no adapter without its tensors
                save_model(lm, trial, {})
            tokenizer.save_pretrained(trial)
    except Exception as error:  # of many types, of transformers, tokenizers and the system
        reason = f"model and tokenizer cannot be saved: {reason_of(error)}"
        raise ValueError(f"output_dir={folder}: {reason}") from error


def _environment() -> dict[str, Any]:
    """Returns what results may depend on beside the options."""
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    return {**versions, "threads": torch.get_num_threads()}


def load_data(a: TrainArguments, tokenizer: Any, lm: Any, objects: Given = NOTHING, *, held_out: bool) -> list[Prompt]:
    """Returns the prompts to train on, or those to evaluate on: none where the options name none."""
    name, split = a.dataset_name, a.dataset_train_split
    if held_out:
        name = a.held_out_name
        split = a.dataset_test_split or ("test" if a.eval_dataset_name or not name else "")
        if not split:
            return []
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or math.inf
    context = positions - a.max_completion_length
    if context < 1:
        raise ValueError(f"max_completion_length={a.max_completion_length}; the model has {positions} positions in all")
    prompts = load_prompts(
        objects.data.get(name or "", name or ARITHMETIC), split=split, tokenizer=tokenizer, context=context,
        config=a.dataset_config if name == a.dataset_name else None,
        prompt_column=a.prompt_column, answer_column=a.answer_column, system_prompt=a.system_prompt,
        chat_template_kwargs=a.chat_template_kwargs,
    )  # fmt: skip
    largest = max(tokenizer.pad_token_id, *(max(prompt.ids) for prompt in prompts))
    if largest >= (rows := lm.get_input_embeddings().weight.shape[0]):
        raise ValueError(
            f"the tokenizer gives {tokenizer.convert_ids_to_tokens(largest)!r} the id {largest}, the model has {rows} "
            f"embeddings; expected its own tokenizer, or a model after resize_token_embeddings({len(tokenizer)})"
        )
    return prompts[: a.eval_max_prompts] if held_out else prompts


def longest_row(a: TrainArguments, prompts: Sequence[Prompt]) -> int:
    """Returns the tokens of the longest prompt and completion, or what the user lets vLLM have."""
    engine_length = (a.vllm_kwargs or {}).get("max_model_len")
    if isinstance(engine_length, int) and engine_length > 0:
        return engine_length
    return max(len(prompt.ids) for prompt in prompts) + a.max_completion_length


def make_rewards(
    a: TrainArguments, tokenizer: Any, prompts: Sequence[Prompt], held_out: Sequence[Prompt], objects: Given = NOTHING
) -> Rewards | None:
    """Returns the reward functions, which find the columns that they read; None where options name none."""
    if not a.reward_funcs:
        return None
    # path/file.py:function by an absolute path: the import of another one may change the working directory.
    specs: list[Any] = [
        os.path.abspath(spec) if isinstance(spec, str) and os.path.isfile(spec.rpartition(":")[0]) else spec
        for spec in objects.rewards or a.reward_funcs
    ]
    rewards = Rewards(specs, a.reward_weights, max_length=a.max_completion_length)
    for where, part in (("", prompts), ("held-out prompts: ", held_out)):
        try:
            if part:
                rewards.check({name: [prompt.columns.get(name) for prompt in part] for name in part[0].columns})
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
    rewards.check_form(tokenizer, [*prompts, *held_out])
    return rewards
