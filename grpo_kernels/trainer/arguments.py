"""The options of `grpo-kernels train`. Where TRL's GRPOConfig has an option of that meaning, the name is the same."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import torch
import yaml

from .. import __version__
from ..config import GRPOConfig, available_presets
from ..corrections import check_rejections
from ..names import ADVANTAGE_SCALES
from ..teacher import TopKMode
from . import demo, missing_packages
from .data import check_source, is_one_split
from .records import plain
from .tasks import ARITHMETIC

# Types of options say what is expected of their values, where the loss does not check it.
RANGES: dict[Any, Callable[[float], bool]] = {
    "at least 0": lambda x: 0 <= x < math.inf,
    "at least 1": lambda x: x >= 1,
    "a positive number: ratios need probabilities": lambda x: x > 0,
    "a number in (0, 1]": lambda x: 0 < x <= 1,
    "a number in [0, 1]": lambda x: 0 <= x <= 1,
    "a finite number": math.isfinite,
}
Count: TypeAlias = Annotated[int, "at least 1"]
Natural: TypeAlias = Annotated[int, "at least 0"]
Size: TypeAlias = Annotated[float, "at least 0"]
Positive: TypeAlias = Annotated[float, "a positive number: ratios need probabilities"]
Share: TypeAlias = Annotated[float, "a number in (0, 1]"]
Part: TypeAlias = Annotated[float, "a number in [0, 1]"]
Finite: TypeAlias = Annotated[float, "a finite number"]
Loss: TypeAlias = Annotated[str, ("fused", "eager")]
Preset: TypeAlias = Annotated[str, tuple(available_presets())]
Dtype: TypeAlias = Annotated[str, ("float32", "bfloat16")]
Tracker: TypeAlias = Annotated[str, ("tensorboard", "trackio", "wandb")]
Correction: TypeAlias = Annotated[str, ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none")]
Rest: TypeAlias = Annotated[str, get_args(TopKMode)]
Scale: TypeAlias = Annotated[str, tuple(ADVANTAGE_SCALES)]
# Those of transformers that need no arguments and do not follow the loss, which is no measure of progress in GRPO.
Schedule: TypeAlias = Annotated[
    str, ("linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant", "constant_with_warmup")
]
Json: TypeAlias = dict[str, Any]

REMOVED = {  # option -> what does its work
    "reward_timeout": "a function that may hang sets its own limit, as examples/run_program.py does",
}

ADAMW = ("betas", "eps", "weight_decay")  # what optim_args may hold

# What an arithmetic run without these options takes: 32 prompts, 8 completions, two steps on each rollout.
ARITHMETIC_RUN: dict[str, Any] = {
    "reward_funcs": [ARITHMETIC], "beta": 0.005, "max_completion_length": 5, "per_device_train_batch_size": 256,
    "num_iterations": 2, "max_steps": 400, "learning_rate": 2e-4, "warmup_steps": 20,
    "lr_scheduler_type": "constant_with_warmup",
}  # fmt: skip
DEMO = {**ARITHMETIC_RUN, "output_dir": "grpo-demo"}
# In --help an option belongs to the group that begins with it or with the nearest option above it.
GROUPS = {
    "output_dir": "run", "model_name_or_path": "model", "dataset_name": "data", "num_generations": "sampling",
    "per_device_train_batch_size": "loss", "learning_rate": "optimisation", "eval_steps": "evaluation and saving",
}  # fmt: skip


def _option(default: Any, text: str) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


class Kind(NamedTuple):
    """The values of an option: their type, what is expected of them (a key of RANGES, or the choices), whether it takes
    several, and whether None."""

    type: Any
    expected: Any
    several: bool
    optional: bool


ACCEPTED: dict[Any, Any] = {  # numbers of numpy are numbers
    bool: bool, int: numbers.Integral, float: numbers.Real, str: (str, Path), Json: dict,
}  # fmt: skip


def _kind_of(hint: Any) -> Kind:
    optional = NoneType in get_args(hint)
    hint = get_args(hint)[0] if optional else hint
    several = get_origin(hint) is list
    hint = get_args(hint)[0] if several else hint
    kind, expected = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
    return Kind(kind, expected, several, optional)


@dataclass
class TrainArguments:
    """One run. Batch sizes count completions; lengths are in tokens; KL, entropies and log-probabilities in nats."""

    output_dir: str = _option("grpo-run", "folder for everything that the run writes")
    resume_from_checkpoint: str | None = _option(None, "'auto' (the newest sound one, or a new run), or a folder")
    dry_run: bool = _option(False, "check model, data and rewards, time and weigh one step, and write nothing")
    seed: int = _option(0, "of weights, order of the data and samples")
    fsdp: bool = _option(False, "shard with FSDP2 under torchrun; accelerate launch has its own configuration")
    use_cpu: bool = _option(False, "on the CPU, whatever the machine has")

    model_name_or_path: str | None = _option(None, "a model of transformers; without one: a small one for arithmetic")
    trust_remote_code: bool = _option(False, "run the code of the model's repository")
    dtype: Dtype = _option("float32", "of the weights; AdamW steps float32 copies of bfloat16 ones")
    bf16: bool = _option(False, "autocast to bfloat16")
    gradient_checkpointing: bool = _option(False, "recompute activations in the backward")
    share_prompts: bool = _option(False, "run a prompt through the model once for its completions")
    use_peft: bool = _option(False, "train a LoRA adapter")
    lora_r: Count = _option(16, "rank of the adapter")
    lora_alpha: Count = _option(32, "scale of the adapter, times its rank")
    lora_target_modules: list[str] | None = _option(None, "modules with an adapter; default: all linear ones")

    dataset_name: str | None = _option(None, "a file (.jsonl, .json, .csv, .parquet), a folder, or a name of datasets")
    dataset_config: str | None = _option(None, "configuration of dataset_name, where datasets asks for one")
    dataset_train_split: str = _option("train", "split to train on")
    dataset_test_split: str | None = _option(None, "split to evaluate on")
    eval_dataset_name: str | None = _option(None, "a data set of its own to evaluate on")
    prompt_column: str = _option("prompt", "column with the prompt: a text, or messages")
    answer_column: str | None = _option(None, "column that rewards get as 'answer'; COLUMN.NAME: a part of one")
    system_prompt: str | None = _option(None, "text of a system message before each prompt")
    chat_template_kwargs: Json | None = _option(
        None, 'variables of the chat template, as JSON: {"enable_thinking": false}'
    )

    reward_funcs: list[str] = _option([], "names of built-in rewards, module:function, or path/file.py:function")
    reward_weights: list[float] | None = _option(None, "one per reward; default: 1")
    step_delimiter: str = _option("\n", "ends a step, where a reward function returns one reward per step")

    num_generations: Count = _option(8, "completions per prompt")
    max_completion_length: Count = _option(256, "tokens of a completion, its end included")
    temperature: Positive = _option(1.0, "of sampling, and of the loss")
    top_p: Share = _option(1.0, "sample from the likeliest ids with this mass; the loss is over the ids kept")
    top_k: Natural = _option(0, "sample from the likeliest so many; 0: all")
    min_p: Part = _option(0.0, "sample from ids with at least this share of the likeliest's probability; 0: all")
    dynamic_sampling: bool = _option(False, "leave groups of equal rewards out of the loss and its denominators")

    use_vllm: bool = _option(False, "sample with vLLM, an engine beside each process")
    vllm_kwargs: Json | None = _option(
        None, "further arguments of vllm.LLM, as JSON (default: a share of 0.3 of GPU memory)"
    )
    vllm_importance_sampling_mode: Correction = _option("sequence_mask", "how old / rollout weights are bounded")
    vllm_importance_sampling_clip_max: Size = _option(3.0, "upper bound of the weights")
    rollout_is_batch_normalize: bool = _option(False, "divide the weights by their mean over a rollout")
    rollout_rs: Json | None = _option(
        None, 'weight 0 beyond these bounds of rejection_mask, as JSON: {"token_k1": [0.5, 2.0], "seq_mean_k3": 0.01}'
    )
    rollout_rs_mask: bool = _option(False, "leave what is rejected out of the loss and its denominators, as verl does")

    per_device_train_batch_size: Count = _option(8, "completions in a forward and backward pass")
    gradient_accumulation_steps: Count = _option(1, "passes per optimizer step")
    steps_per_generation: Count | None = _option(None, "passes per rollout; default: gradient_accumulation_steps")
    num_iterations: Count = _option(1, "times that each rollout is used")
    max_steps: Count = _option(500, "optimizer steps of the run")

    loss: Loss = _option("fused", "fused: this library's; eager: plain PyTorch over all logits")
    loss_type: Preset = _option("dapo", "a preset of the loss")
    epsilon: float | None = _option(None, "lower clip range; default: the preset's")
    epsilon_high: float | None = _option(None, "upper clip range; default: the preset's, or epsilon where it is given")
    scale_rewards: Scale | None = _option(None, "whose standard deviation divides advantages; default: the preset's")
    mask_truncated_completions: bool = _option(False, "leave completions without an end out of the loss")
    beta: float = _option(0.0, "weight of the KL to the reference policy; 0: no reference policy")
    kl_target: float | None = _option(None, "KL per token that an adaptive beta aims at")
    ref_model_sync_steps: Count | None = _option(None, "steps between moves of the reference policy; default: it stays")
    loss_options: Json | None = _option(None, "further fields of GRPOConfig, as JSON")

    teacher_model_name_or_path: list[str] = _option([], "models of transformers with the same ids, to distil from")
    teacher_column: str | None = _option(
        None, "column that names a prompt's teacher, by its path or the last part of it"
    )
    teacher_top_k: Count | None = _option(None, "the policy's likeliest ids that the divergence is over; default: all")
    teacher_top_k_mode: Rest = _option("tail", "what it takes for the other ids")

    learning_rate: Size = _option(1e-6, "of AdamW")
    lr_scheduler_type: Schedule = _option("linear", "schedule of transformers")
    warmup_steps: Natural = _option(0, "optimizer steps until the full rate")
    optim_args: Json | None = _option(None, f"{', '.join(ADAMW)} of AdamW, as JSON; without it weights do not decay")
    max_grad_norm: Size = _option(1.0, "gradients are scaled down to this norm; 0: never")

    eval_steps: Count | None = _option(None, "optimizer steps between evaluations; default: before and after only")
    eval_num_samples: Count = _option(4, "completions per held-out prompt")
    eval_max_prompts: Count | None = _option(None, "held-out prompts; default: all")
    correct_at: Finite | None = _option(
        None, "total reward that is correct, of pass@k; default: 1 where all are 0 or 1"
    )

    save_steps: Natural = _option(100, "optimizer steps between checkpoints; 0: one at the end")
    save_total_limit: Count | None = _option(2, "checkpoints that are kept")
    logging_steps: Count = _option(10, "optimizer steps between lines, where there is no progress bar")
    report_to: list[Tracker] = _option([], "trackers that get the numbers too")

    @property
    def passes_per_rollout(self) -> int:
        """Counts forward and backward passes of a rank on a rollout, each time that it is used."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def steps_per_rollout(self) -> int:
        """Counts optimizer steps on a rollout."""
        return self.num_iterations * self.passes_per_rollout // self.gradient_accumulation_steps

    def rows_per_step(self, num_processes: int) -> int:
        """Counts completions of an optimizer step, those of all processes together."""
        return self.per_device_train_batch_size * num_processes * self.gradient_accumulation_steps

    def rows_per_rollout(self, num_processes: int) -> int:
        return self.per_device_train_batch_size * num_processes * self.passes_per_rollout

    @property
    def truncates(self) -> bool:
        """Says whether sampling keeps a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def corrects(self) -> bool:
        """Says whether another engine sampled, so that its log-probabilities weight the loss."""
        return self.use_vllm and (self.vllm_importance_sampling_mode != "none" or self.rollout_rs is not None)

    @property
    def distills_only(self) -> bool:
        """Says whether the loss is the divergence to the teacher alone."""
        return bool(self.teacher_model_name_or_path) and not self.reward_funcs

    @property
    def held_out_name(self) -> str | None:
        """Returns the data set that held-out prompts are from."""
        return self.eval_dataset_name or self.dataset_name

    def is_given(self, name: str) -> bool:
        """Says whether an option differs from its default; of a field of the loss, whether loss_options hold it."""
        if name in (self.loss_options or {}):
            return True
        return hasattr(type(self), name) and bool(getattr(self, name) != getattr(type(self), name))

    def loss_config(self) -> GRPOConfig:
        """Returns the loss: the preset with what was given."""
        fixed = GRPOConfig.preset(self.loss_type).aggregation == "fixed_length"
        from_options: dict[str, Any] = {
            "epsilon_low": self.epsilon,
            "epsilon_high": self.epsilon if self.epsilon_high is None else self.epsilon_high,
            "advantage_scale": self.scale_rewards,
            "max_completion_length": self.max_completion_length if fixed else None,
            "temperature": self.temperature,
            "beta": self.beta,
        }
        further, where = self.loss_options or {}, f"loss_options={self.loss_options}"
        if twice := from_options.keys() & further.keys():
            raise ValueError(f"{where}: {', '.join(sorted(twice))} has an option of its own")
        if known := further.keys() & {"logit_scale", "logit_softcap"}:
            raise ValueError(f"{where}: {', '.join(sorted(known))} is read from the model")
        fields = {name: value for name, value in from_options.items() if value is not None} | further
        if isinstance(dtype := fields.get("logits_dtype"), str):  # JSON has its name
            fields["logits_dtype"] = getattr(torch, dtype.removeprefix("torch."), dtype)
        if self.teacher_model_name_or_path:
            fields.setdefault("distill_coef", 1.0)
        try:
            return GRPOConfig.preset(self.loss_type, **fields)
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None

    def scoring_options(self) -> dict[str, Any]:
        """Returns options of `fused_logps`, with which the policy's log-probabilities are those of the loss."""
        config = self.loss_config()
        # loss=eager does not have logits_dtype.
        dtype = {} if config.logits_dtype is None else {"logits_dtype": config.logits_dtype}
        return {"temperature": config.temperature, **dtype}

    def check_values(self) -> None:
        """Raises TypeError or ValueError for an option of another type or out of range, by its name."""
        for name, kind in KINDS.items():
            if (value := getattr(self, name)) is None and kind.optional:
                continue
            values = value if kind.several else [value]
            if not isinstance(values, (list, tuple)) or not all(
                isinstance(one, ACCEPTED[kind.type]) and isinstance(one, bool) == (kind.type is bool) for one in values
            ):
                expected = f"list[{kind.type.__name__}]" if kind.several else kind.type.__name__
                raise TypeError(f"{name}={value!r:.60} is a {type(value).__name__}; expected {expected}")
            if value == "":  # of an unset variable: it would be taken for an option that was left out
                raise ValueError(f"{name} is empty; expected a value, or the option left out")
            for one in values:
                if isinstance(kind.expected, tuple) and one not in kind.expected:
                    raise ValueError(f"{name}={one!r}; expected one of {', '.join(kind.expected)}")
                if kind.expected in RANGES and not RANGES[kind.expected](one):
                    raise ValueError(f"{name}={one}; expected {kind.expected}")

    def check(self, num_processes: int) -> None:
        """Raises TypeError or ValueError for options that `check_values` refuses, contradict each other or have no
        effect, by name."""
        self.check_values()
        if self.rollout_rs is not None:
            check_rejections(self.rollout_rs, "rollout_rs")
        for wrong, sentence in (*self._contradictions(num_processes), *self._without_effect(num_processes)):
            if wrong:
                raise ValueError(sentence)
        for option, package in (("use_peft", "peft"), ("use_vllm", "vllm")):
            if getattr(self, option) and (missing := missing_packages({package: package})):
                raise ValueError(f"{option} {missing}")
        for name in ("model_name_or_path", "teacher_model_name_or_path", "dataset_name", "eval_dataset_name"):
            given = getattr(self, name)
            for source in given if KINDS[name].several else [given] if given else []:
                check_source(name, source, "dataset" if "dataset" in name else "model")

    def _contradictions(self, num_processes: int) -> Iterator[tuple[bool, str]]:
        """Returns (whether it is so, what is wrong) of options that are right one by one."""
        a, config = self, self.loss_config()
        passes, rows = a.passes_per_rollout, a.rows_per_rollout(num_processes)
        teaches = bool(a.teacher_model_name_or_path)
        yield from (
            (passes % a.gradient_accumulation_steps > 0,
             f"steps_per_generation={a.steps_per_generation} is no multiple of "
             f"gradient_accumulation_steps={a.gradient_accumulation_steps}"),
            (rows % a.num_generations > 0,
             f"num_generations={a.num_generations} does not divide the {rows} completions of a rollout: "
             f"per_device_train_batch_size={a.per_device_train_batch_size} x {num_processes} processes x {passes} "
             "passes"),
            (a.num_generations == 1 and config.advantage_baseline != "none",
             "num_generations=1: the mean of a group of one leaves no advantage; expected at least 2, or "
             """loss_options='{"advantage_baseline": "none"}' with scale_rewards other than group"""),
            ((a.model_name_or_path is None) != (a.dataset_name is None),
             f"{'dataset_name' if a.dataset_name is None else 'model_name_or_path'} is missing; without both, the run "
             "is the generated arithmetic task"),
            (not a.reward_funcs and not teaches,
             "reward_funcs is empty; expected names of built-in rewards, module:function, or path/file.py:function"),
            (bool(a.reward_funcs) and a.reward_weights is not None and not any(a.reward_weights),
             f"reward_weights={a.reward_weights} leave no reward; expected one that is not 0"),
            (a.kl_target is not None and not (0 < a.kl_target < math.inf and a.beta > 0),
             f"kl_target={a.kl_target} with beta={a.beta}; expected two positive numbers"),
            (a.share_prompts and a.gradient_checkpointing,
             "share_prompts keeps the keys and values that gradient_checkpointing recomputes: expected one of them"),
            (a.loss == "eager" and a.truncates,
             "loss='eager' is over all ids: top_p, top_k and min_p do not go with it"),
            (teaches and (a.loss == "eager" or a.truncates or config.sparse_backward is not None),
             "a teacher needs the exact loss over all ids: loss='eager', top_p, top_k, min_p and sparse_backward do "
             "not go with teacher_model_name_or_path"),
            (len(a.teacher_model_name_or_path) > 1 and a.teacher_column is None,
             f"teacher_column is missing; teacher_model_name_or_path={a.teacher_model_name_or_path} are several, and a "
             "column of the data names that of each prompt"),
            (teaches and config.distill_coef == 0, "distill_coef=0 leaves teacher_model_name_or_path without effect"),
            (a.use_vllm and config.surrogate == "vespo"
             and (a.vllm_importance_sampling_mode.startswith("sequence") or a.rollout_is_batch_normalize
                  or (a.rollout_rs is not None and not a.rollout_rs_mask)),
             "VESPO multiplies the weights of a completion's tokens: expected a vllm_importance_sampling_mode of "
             "tokens, no rollout_is_batch_normalize, and rollout_rs with rollout_rs_mask alone"),
            (a.use_vllm and a.truncates and not a.top_k,
             "use_vllm with top_p or min_p needs a top_k too: vLLM returns the ids that it keeps with top_k > 0 only"),
        )  # fmt: skip

    def _without_effect(self, num_processes: int) -> Iterator[tuple[bool, str]]:
        """Returns the same of options, and fields of loss_options, that change nothing."""
        a = self
        for name, data in (("dataset_train_split", a.dataset_name), ("dataset_test_split", a.held_out_name)):
            other = "" if a.eval_dataset_name else "; eval_dataset_name takes another one"
            yield is_one_split(data) and a.is_given(name), f"{name}={getattr(a, name)!r}: {data} is one split{other}"
        arithmetic, teacher = a.model_name_or_path is None, a.teacher_model_name_or_path
        for needed, present, names in (
            ("beta", a.beta, ("kl_clamp", "kl_estimator", "use_bias_correction_kl", "ref_model_sync_steps")),
            ("teacher_model_name_or_path", teacher, ("distill_coef", "divergence", "divergence_beta", "teacher_top_k")),
            ("several teachers", len(teacher) > 1, ("teacher_column",)),
            ("teacher_top_k", a.teacher_top_k, ("teacher_top_k_mode",)),
            ("use_peft", a.use_peft, ("lora_r", "lora_alpha", "lora_target_modules")),
            ("loss=fused", a.loss == "fused", ("sparse_backward", "chunk_rows", "logits_dtype")),
            ("use_vllm", a.use_vllm, ("vllm_kwargs", "vllm_importance_sampling_mode", "rollout_rs")),
            ("rollout_rs", a.rollout_rs, ("rollout_rs_mask",)),
            ("use_vllm and a vllm_importance_sampling_mode",
             a.use_vllm and a.vllm_importance_sampling_mode != "none",
             ("vllm_importance_sampling_clip_max", "rollout_is_batch_normalize")),
            ("old or rollout log-probabilities (num_iterations, steps_per_generation, use_vllm)",
             a.steps_per_rollout > 1 or a.corrects, ("off_policy_mask_threshold",)),
            ("dataset_test_split or eval_dataset_name", arithmetic or a.dataset_test_split or a.eval_dataset_name,
             ("eval_steps", "eval_num_samples", "eval_max_prompts", "correct_at")),
            ("reward_funcs", a.reward_funcs,
             ("reward_weights", "step_delimiter", "dataset_test_split", "eval_dataset_name",
              "dynamic_sampling")),
            ("dataset_name", not arithmetic,
             ("prompt_column", "answer_column", "system_prompt", "chat_template_kwargs")),
            ("a schedule with warm-up", arithmetic or a.lr_scheduler_type != "constant", ("warmup_steps",)),
            ("several processes (torchrun, accelerate launch)", num_processes > 1, ("fsdp",)),
        ):  # fmt: skip
            for name in names:
                value = (a.loss_options or {}).get(name, getattr(a, name, None))
                yield a.is_given(name) and not present, f"{name}={value!r} has no effect without {needed}; leave it out"


KINDS = {name: _kind_of(hint) for name, hint in get_type_hints(TrainArguments, include_extras=True).items()}


# --- the command line -------------------------------------------------------------------------------------------------

DESCRIPTIONS = {
    "train": "A GRPO run on a model of transformers; without --model-name-or-path and --dataset-name on the generated "
    "arithmetic task. Where TRL's GRPOConfig has an option of that meaning, the name is the same.",
    "demo": "A small language model learns two-digit addition, offline: the default run of grpo-kernels train, into "
    "grpo-demo. With --model smollm2 a chat model learns to answer questions. Takes the options of train.",
}


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def json_object(text: str) -> Json:
    return dict(json.loads(text))


def make_parser(command: str) -> argparse.ArgumentParser:
    """Returns a parser of the options of `TrainArguments`, in groups. What is not given is not in the namespace."""
    parser = argparse.ArgumentParser(
        prog=f"grpo-kernels {command}", usage="%(prog)s [options]", description=DESCRIPTIONS[command],
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # as from Python 3.14 on: -1e-3 is no option
    parser.add_argument("--version", action="version", version=f"grpo-kernels {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; the command line has the last word")
    if command == "demo":
        demo.add_options(parser.add_argument_group("demo"))
    group = parser.add_argument_group("options")
    for field in dataclasses.fields(TrainArguments):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        default = field.default
        if command == "demo":
            default = DEMO.get(field.name, default)
        text = field.metadata["help"]
        if isinstance(default, (str, int, float)) and not isinstance(default, bool):
            text += f" (default: {default!r})" if default == "\n" else f" (default: {default})"
        add_option(group, field.name, text)
    return parser


def add_option(group: Any, field: str, text: str) -> None:
    """Adds the option of a field of `TrainArguments`, whose type says how it is read and what is shown of its
    values."""
    kind, name = KINDS[field], f"--{field.replace('_', '-')}"
    if kind.type is bool:
        group.add_argument(name, type=boolean, nargs="?", const=True, metavar="true", help=text)
        return
    choices = f"{{{','.join(kind.expected)}}}" if isinstance(kind.expected, tuple) else ""
    group.add_argument(
        name, type=json_object if kind.type == Json else kind.type, nargs="+" if kind.several else None, help=text,
        metavar=choices or {str: "X", int: "N", float: "R"}.get(kind.type, "JSON"),
    )  # fmt: skip


def suggestion(name: str) -> str:
    """Returns the option that a wrong name most likely means, or what does the work of one that is no more, as the end
    of a sentence; '' where neither is near."""
    name = name.lstrip("-").split("=")[0].replace("-", "_")
    if name in REMOVED:
        return f" (this option was removed: {REMOVED[name]})"
    near = difflib.get_close_matches(name, TrainArguments.__dataclass_fields__, n=1, cutoff=0.75)
    return f" (did you mean --{near[0].replace('_', '-')}?)" if near else ""


def parse(argv: Sequence[str], command: str = "train", preset: Sequence[str] = ()) -> TrainArguments:
    """Returns the options from a command line, on top of those of the YAML file that --config names, on top of the
    words `preset`. command: whose usage --help and errors show. Ends the process, as argparse does, for an unknown
    option and a value of another type."""
    parser = make_parser(command)

    def read(words: Sequence[str]) -> dict[str, Any]:
        spelled = [re.sub(r"^--\w+", lambda name: name[0].replace("_", "-"), word) for word in words]
        namespace, rest = parser.parse_known_args(spelled)
        if rest:
            words = [f"{word}{suggestion(word)}" if word.startswith("--") else word for word in rest]
            parser.error(f"unrecognized arguments: {' '.join(words)}")
        return vars(namespace)

    from_line = read(argv)
    options = read(preset) | (_from_yaml(from_line["config"]) if "config" in from_line else {}) | from_line
    options = {name: value for name, value in options.items() if name in KINDS}
    arithmetic = not {"model_name_or_path", "dataset_name"} & options.keys()
    return TrainArguments(**(ARITHMETIC_RUN if arithmetic else {}) | options)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes 1e-8 for a number, as JSON and YAML 1.2 do; in YAML 1.1 it is text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _from_yaml(path: str) -> dict[str, Any]:
    """Returns the options of a file; without those that are null."""
    options: dict[str, Any] = {}
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("it holds no options")
        for key, value in node.value:
            name = str(key.value).replace("-", "_")
            if name not in KINDS:
                raise ValueError(f"{key.value!r} is no option of a run{suggestion(name)}")
            if name in options:
                raise ValueError(f"{name} is there twice")
            options[name] = _value_of(value, KINDS[name], loader)
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"config={path}: {error}; expected options, one 'name: value' a line") from None
    return {name: value for name, value in options.items() if value is not None}


def _value_of(node: yaml.Node, kind: Kind, loader: _Loader) -> Any:
    """Returns the value of an option; of one that is a text what stands there, a date or a number as it may look."""
    if kind.several:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values = [_value_of(one, kind._replace(several=False), loader) for one in nodes]
        return None if values == [None] and nodes == [node] else values
    value = loader.construct_object(node, deep=True)
    is_text = kind.type is str and isinstance(node, yaml.ScalarNode) and value is not None
    return node.value if is_text else value


def to_json(arguments: TrainArguments, num_processes: int) -> dict[str, Any]:
    """Returns what config.json holds."""
    return plain(dataclasses.asdict(arguments) | {"processes": num_processes})
