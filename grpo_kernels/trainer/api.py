"""`train`: a run from Python, with objects where the command line has names."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedModel

from . import RunError
from .arguments import TrainArguments
from .data import GIVEN_ROWS
from .files import read_file
from .loop import Trainer
from .model import is_peft_model
from .rewards.functions import name_of
from .run import Given, open_run

if TYPE_CHECKING:
    from peft import PeftModel

Reward: TypeAlias = "str | Callable[..., Any]"
Rows: TypeAlias = "str | Path | Iterable[Mapping[str, Any]]"


def train(
    model: str | Path | PreTrainedModel | PeftModel,
    reward_funcs: Reward | Sequence[Reward],
    train_dataset: Rows,
    args: TrainArguments | None = None,
    eval_dataset: Rows | None = None,
    *,
    processing_class: Any = None,
) -> dict[str, Any]:
    """Makes a GRPO run, as `grpo-kernels train` does.

    Args:
        model: a folder or a name of transformers, or a model, which is trained where it is, without dropout. Of a
            PeftModel the active adapter is trained on; `args.use_peft` goes without saying.
        reward_funcs: one or several: names as on the command line, or functions, which run in this process.
        train_dataset, eval_dataset: rows (a `datasets.Dataset`, a list of dicts), or a name as on the command line.
        args: everything else; what the other arguments say is left out of it. Default: TrainArguments().
        processing_class: the tokenizer; default: that of the model.

    Returns:
        What summary.json in `output_dir` holds, and "output_dir", a Path.

    Raises:
        ValueError, TypeError: before the first step, for a wrong argument, by its name.
        RunError: the run cannot go on (rewards that fail, a full disk), or SIGTERM stopped it.
        KeyboardInterrupt: Ctrl-C. As SIGTERM it leaves a checkpoint, from which the same call with
            args.resume_from_checkpoint="auto" goes on.
    """
    args = TrainArguments() if args is None else args
    whole: Any = model
    if is_peft_model(model):
        whole = whole.get_base_model()
    several = isinstance(reward_funcs, Iterable) and not isinstance(reward_funcs, str)
    rewards: list[Any] = [*reward_funcs] if several else [reward_funcs]  # type: ignore[misc]
    checks: tuple[tuple[str, object, Any, str], ...] = (
        ("args", args, TrainArguments, "a TrainArguments"),
        ("model", whole, (str, Path, PreTrainedModel), "a path, a name, a PreTrainedModel or a PeftModel"),
        ("train_dataset", train_dataset, (Path, Iterable), "rows, a path or a name"),
        ("eval_dataset", eval_dataset, (Path, Iterable, type(None)), "rows, a path or a name"),
        *(("reward_funcs", reward, (str, Callable), "names and functions") for reward in rewards),
    )
    for name, value, kinds, expected in checks:
        if not isinstance(value, kinds):
            raise TypeError(f"{name} is a {type(value).__name__}; expected {expected}")
    for name, instead in (
        ("model_name_or_path", "model"), ("dataset_name", "train_dataset"), ("eval_dataset_name", "eval_dataset"),
        ("reward_funcs", "reward_funcs"), ("dry_run", "the command grpo-kernels train"),
    ):  # fmt: skip
        if getattr(args, name):
            raise ValueError(f"args.{name}={getattr(args, name)!r}; expected {instead} of train() alone")
    if getattr(whole, "_hf_peft_config_loaded", False):
        raise ValueError("model has adapters of transformers (load_adapter, add_adapter); expected a PeftModel of peft")
    datasets = [str(rows) if isinstance(rows, Path) else rows for rows in (train_dataset, eval_dataset)]
    data: dict[str, Any] = dict(zip(GIVEN_ROWS, datasets, strict=True))
    names = [rows if isinstance(rows, (str, type(None))) else name for name, rows in data.items()]
    recorded = [reward if isinstance(reward, str) else name_of(reward) for reward in rewards]
    args = replace(args, dataset_name=names[0], eval_dataset_name=names[1], reward_funcs=recorded)
    if isinstance(whole, PreTrainedModel):
        dtype = str(whole.dtype).removeprefix("torch.")
        if args.is_given("dtype") and args.dtype != dtype:
            raise ValueError(f"args.dtype={args.dtype} with a model of {dtype}; expected model.to(torch.{args.dtype})")
        if args.use_vllm:
            raise ValueError("args.use_vllm=True with a model in memory; expected its folder: vLLM reads its own copy")
        name = f"a {type(model).__name__} given to train()"
        args = replace(args, dtype=dtype, model_name_or_path=name, use_peft=args.use_peft or whole is not model)
        objects = Given(data, rewards, processing_class, model)
    else:
        args, objects = replace(args, model_name_or_path=str(model)), Given(data, rewards, processing_class)
    try:
        run = open_run(args, objects)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # a notebook keeps it, and with it the half-made run and its lock
        raise
    try:
        status = Trainer(run).train()
    finally:
        run.close()
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise RunError(f"signal {status - 128} stopped the run; {run.folder} holds a checkpoint")
    return json.loads(read_file(run.folder / "summary.json")) | {"output_dir": run.folder}
