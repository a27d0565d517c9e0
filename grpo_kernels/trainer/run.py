"""Set-up: everything that a run needs and that does not change. What is wrong is said here, before the first step."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import get_scheduler

from .accelerator import init_trackers, make_accelerator, zero_stage
from .arguments import ARITHMETIC, TrainArguments, to_json
from .batch import model_inputs
from .checkpoint import (
    CONFIG,
    RUN,
    check_same_run,
    check_state,
    checkpoints,
    find_checkpoint,
    load_replay,
    remove_leftovers,
    write_atomically,
    write_text,
)
from .data import Prompt, load_prompts
from .log import LOG, SAMPLES, RunLog
from .model import Policy, ReferencePolicy, load_model, load_tokenizer
from .ranks import Ranks, Signals
from .rewards import Rewards
from .rollout import Completion, Sampler, eos_ids, infer
from .vllm import VLLM

OWN = (LOG, SAMPLES, CONFIG, "summary.json", "report.html", "model", "rollouts")


class Given(NamedTuple):
    """What `train` has as objects. data: rows by the names that stand for them; rewards: in place of reward_funcs."""

    data: dict[str, Any]
    rewards: Sequence[Any] | None = None
    tokenizer: Any = None
    model: Any = None


NOTHING = Given({})


class Run:
    """The parts of a run. policy: as the accelerator prepared it; checkpoint: the one to go on from.

    Making them raises ValueError or TypeError, one sentence, with nothing overwritten.
    """

    def __init__(self, arguments: TrainArguments, given: Given = NOTHING):
        self.arguments = a = arguments
        self.ranks, self.folder = Ranks(use_cpu=a.use_cpu), Path(a.output_dir)
        a.check(self.ranks.count)
        self.accelerator = make_accelerator(a)
        with self.ranks.raise_on_all():
            self.checkpoint = _claim(self.folder, a, self.ranks.count)
            if self.accelerator.is_main_process:
                self.unlock = weakref.finalize(self, os.close, _lock(self.folder))
                remove_leftovers(self.folder)
            source = a.model_name_or_path or _make_start_model(self.folder, a, self.ranks)
        tokenizer = load_tokenizer(getattr(given.model, "name_or_path", source), a, given.tokenizer)
        lm = load_model(source, a, self.checkpoint, given.model)
        self.prompts, self.held_out = (load_data(a, tokenizer, lm, given, held_out=wanted) for wanted in (False, True))
        self.vocab_size = lm.get_input_embeddings().weight.shape[0]
        for i in range(a.num_rollouts if a.replay else 0):
            load_replay(a, i, self.ranks.count, self.vocab_size)
        if self.checkpoint is not None:
            check_state(self.checkpoint, a, self.prompts, zero_stage(self.accelerator))
        self.rewards = make_rewards(a, self.prompts, self.held_out, given)
        policy, ends = Policy(lm, eager=a.loss == "eager"), eos_ids(lm, tokenizer)
        vllm = VLLM(source, a) if a.use_vllm else None
        self.policy, self.optimizer = self.accelerator.prepare(policy, _make_optimizer(policy, a))
        self.bare_policy: Policy = self.accelerator.unwrap_model(self.policy)
        self.scheduler = _make_scheduler(self.optimizer, a)
        self._score_a_token(tokenizer.pad_token_id, ends[0])
        with self.ranks.raise_on_all():
            if not a.dry_run:
                init_trackers(self.accelerator, a)
            if self.accelerator.is_main_process:
                write_text(self.folder / CONFIG, json.dumps(to_json(a, self.ranks.count), indent=1) + "\n")
        self.signals = Signals(self.ranks)
        self.reference = ReferencePolicy(self.bare_policy) if a.beta else None
        self.log = RunLog(self.folder, self.accelerator, a)
        self.sampler = Sampler(self.policy, tokenizer, a, ends, self.ranks, self.signals, self.log.part, vllm)

    def _score_a_token(self, pad_id: int, token: int) -> None:
        """The loss refuses a model whose logits it does not understand: before the first rollout, which may take long,
        and where the model is prepared, since parameters are whole in its forward alone. Broken weights show too."""
        a = self.arguments
        row = Completion(0, self.prompts[0].prompt, self.prompts[0].ids, {}, [token], ended=True)
        inputs = model_inputs([row], a, pad_id, self.accelerator.device)
        try:
            logps = infer(self.policy, "logps", **inputs, temperature=a.temperature)
            if bool(logps.isnan().any()):
                raise ValueError("the log-probabilities of its tokens are NaN; expected weights that are finite")
        except (ValueError, TypeError) as error:
            raise ValueError(f"model_name_or_path={a.model_name_or_path}: {error}") from error

    def model_state(self) -> dict[str, torch.Tensor]:
        """Whole parameters; every rank has to ask."""
        state = self.accelerator.get_state_dict(self.policy)
        return {name.removeprefix("lm."): tensor for name, tensor in state.items()}

    def write_model(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        """Model and tokenizer in transformers' format."""
        self.bare_policy.lm.save_pretrained(folder, state_dict=state)
        self.sampler.tokenizer.save_pretrained(folder)

    def save_model(self, folder: Path) -> None:
        """The model alone, atomically."""
        state = self.model_state()
        with self.ranks.raise_on_all():
            if self.accelerator.is_main_process:
                write_atomically(folder, lambda partial: self.write_model(partial, state))

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
        self.log.close()
        if self.accelerator.is_main_process:
            self.unlock()
        # torch 2.13: where a thread of gloo has not yet let go of the last message, taking the process group down waits
        # for that thread, which waits for Python. Without this pause one run in ten of two processes never ends.
        if self.ranks.count > 1:
            time.sleep(0.2)
        if self.sampler.vllm is not None:
            self.sampler.vllm.close()
        self.accelerator.end_training()


def _make_optimizer(policy: Policy, a: TrainArguments) -> Any:
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [  # biases and norms do not decay
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": a.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=a.learning_rate, betas=(a.adam_beta1, a.adam_beta2),
        eps=a.adam_epsilon,
    )  # fmt: skip


def _make_scheduler(optimizer: Any, a: TrainArguments) -> Any:
    try:
        schedule = get_scheduler(
            a.lr_scheduler_type, optimizer, num_warmup_steps=a.warmup_steps, num_training_steps=a.max_steps,
            scheduler_specific_kwargs=a.schedule_options(),
        )  # fmt: skip
        for rate_at in schedule.lr_lambdas:  # some arguments are first read after the warm-up
            rate_at(a.warmup_steps), rate_at(a.max_steps)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"lr_scheduler_kwargs={a.lr_scheduler_kwargs!r}: {error}") from None
    return schedule


# --- the output folder ------------------------------------------------------------------------------------------------


def _claim(folder: Path, a: TrainArguments, num_processes: int) -> Path | None:
    """The checkpoint to go on from, if any. Raises where the folder holds a run that these options do not continue."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={folder} is a file; expected a folder")
    wanted, written, saved = a.resume_from_checkpoint, checkpoints(folder), folder / CONFIG
    checkpoint = find_checkpoint(folder, wanted)
    continues = wanted is not None and saved.exists()
    if checkpoint is not None:
        continues, saved = checkpoint.resolve().parent == folder.resolve(), checkpoint / RUN
    own = sorted(path.name for path in (*(folder / name for name in OWN), *written) if path.exists())
    if own and not continues:
        raise ValueError(
            f"output_dir={folder} holds another run ({', '.join(own[:3])} ...); expected a new folder, or "
            "--resume-from-checkpoint auto"
        )
    if checkpoint is not None or continues:
        check_same_run(saved, a, num_processes)
    if wanted is not None and checkpoint is None:
        print(f"{folder} holds no sound checkpoint: the run begins at step 0", file=sys.stderr)
    if checkpoint is not None and continues and wanted != "auto" and written[0].resolve() != checkpoint.resolve():
        raise ValueError(
            f"resume_from_checkpoint={checkpoint}: {written[0]} is newer; expected 'auto', another output_dir, or a "
            "folder without newer checkpoints"
        )
    return checkpoint


def _lock(folder: Path) -> int:
    """A handle of the folder, which no second run gets while this one has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir={folder} cannot be made: {error.strerror}") from error
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"output_dir={folder} is in use by another run; expected a folder for each run") from None
    except OSError:  # a file system without locks
        pass
    return handle


# --- model, data, rewards ---------------------------------------------------------------------------------------------


def _make_start_model(folder: Path, a: TrainArguments, ranks: Ranks) -> str:
    """The small model of the arithmetic task, made once for each seed."""
    from .arithmetic import start_model

    start = folder / f"start-model-{a.seed}"
    if ranks.index == 0 and not start.exists():
        start_model(start, seed=a.seed, quiet=a.disable_tqdm)
    return str(start)


def load_data(a: TrainArguments, tokenizer: Any, lm: Any, given: Given = NOTHING, *, held_out: bool) -> list[Prompt]:
    """The prompts to train on, or those to evaluate on: none where the options name none."""
    name, split = a.dataset_name, a.dataset_train_split
    if held_out:
        name = a.held_out_name
        split = a.dataset_test_split or ("test" if a.eval_dataset_name or not name else "")
        if not split:
            return []
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or math.inf
    positions, whose = min((positions, "the model"), (a.vllm_max_model_length or math.inf, "vllm_max_model_length"))
    context = positions - a.max_completion_length
    if context < 1:
        raise ValueError(
            f"max_completion_length={a.max_completion_length}; {whose} has {positions} positions for prompt and "
            "completion"
        )
    prompts = load_prompts(
        given.data.get(name or "", name or ARITHMETIC), split=split, tokenizer=tokenizer, context=context,
        config=a.dataset_config if name == a.dataset_name else None, columns=a.columns,
    )  # fmt: skip
    largest = max(tokenizer.pad_token_id, *(max(prompt.ids) for prompt in prompts))
    if largest >= (rows := lm.get_input_embeddings().weight.shape[0]):
        raise ValueError(
            f"the tokenizer gives {tokenizer.convert_ids_to_tokens(largest)!r} the id {largest}, the model has {rows} "
            f"embeddings; expected its own tokenizer, or a model after resize_token_embeddings({len(tokenizer)})"
        )
    return prompts[: a.eval_max_prompts] if held_out else prompts


def make_rewards(
    a: TrainArguments, prompts: Sequence[Prompt], held_out: Sequence[Prompt], given: Given = NOTHING
) -> Rewards | None:
    """The reward functions, which find the columns that they read; None where saved rewards are replayed."""
    if not a.reward_funcs:
        return None
    rewards = Rewards(
        given.rewards or a.reward_funcs,
        a.reward_weights,
        timeout=a.reward_timeout,
        pattern=a.reward_pattern,
        code_partial_credit=a.code_partial_credit,
    )
    for where, part in (("", prompts), ("held-out prompts: ", held_out)):
        names = {name: None for prompt in part for name in prompt.columns}
        try:
            if part:
                rewards.check({name: [prompt.columns.get(name) for prompt in part] for name in names})
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
    return rewards
