"""Training runs of TRL's trainers on tiny models with and without this package: logged numbers and final weights.

As a script, in an environment that `make test EXTRAS=dev,peers` has made:

    python tests/trl_parity.py          all runs, as a table
    python tests/trl_parity.py --write  into grpo_kernels/integrations/README.md
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState
from ranks import run_ranks
from tiny_models import VOCAB, tiny_model

README = Path(__file__).resolve().parents[1] / "grpo_kernels" / "integrations" / "README.md"
TOLERANCE = 5e-5  # relative, in float32
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
NOT_COMPARED = ("runtime", "per_second", "step_time")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCAB))])}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@lru_cache
def saved_model(family: str) -> str:
    """A folder with a tiny model: TRL reads the reference model from there."""
    folder = tempfile.mkdtemp(prefix="grpo_kernels_")
    model = tiny_model(family)
    model.generation_config.eos_token_id = [2, 5, 9]  # completions end early, at any of them
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum((3 * i) % 7 for i in ids) % 5) + 0.1 * len(ids) for ids in completion_ids]


def prompts(count: int = 8) -> Any:
    from datasets import Dataset

    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 6, (count,), generator=g).tolist()
    return Dataset.from_dict(
        {"prompt": [" ".join(f"w{i}" for i in torch.randint(10, VOCAB, (n,), generator=g).tolist()) for n in lengths]}
    )


COMMON: dict[str, Any] = dict(  # of each of TRL's trainers
    per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8, logging_steps=1, optim="sgd",
    learning_rate=0.3, lr_scheduler_type="constant", report_to="none", save_strategy="no", use_cpu=True, bf16=False,
    gradient_checkpointing=False, disable_tqdm=True, seed=5,
)  # fmt: skip


def trl_arguments(folder: str, **options: Any) -> Any:
    from trl import GRPOConfig

    own = dict(num_generations=4, num_iterations=2, max_completion_length=8, temperature=0.9, epsilon=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOConfig(**{"output_dir": folder, **COMMON, **own, **options})


def construct(cls: Any, family: str, *, peft: bool | str | dict[str, Any] | None = None, **given: Any) -> Any:
    """A trainer of this class of a saved model, or with peft of an adapter to it: True, options of LoraConfig, or
    "trained", one that the model brings."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    given.setdefault("model", AutoModelForCausalLM.from_pretrained(saved_model(family)))
    if peft:
        from peft import LoraConfig, get_peft_model

        options = dict(peft) if isinstance(peft, dict) else {}
        if peft == "trained":
            options["init_lora_weights"] = False  # neither of its matrices is 0
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
        given |= {"model": get_peft_model(given["model"], config)} if peft == "trained" else {"peft_config": config}
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(processing_class=tokenizer(), **given)


def make_trainer(cls: Any, family: str, options: dict[str, Any], teacher: str | None = None) -> Any:
    """A trainer of this class; `options` of its configuration, of which peft makes it train an adapter. With a teacher,
    the family of a model, it is one of distillation."""
    options, data = dict(options), prompts()
    peft, own = options.pop("peft", None), {}
    if teacher is None:
        own = {"args": trl_arguments(saved_model(family), **options), "reward_funcs": reward}
    else:
        from transformers import AutoModelForCausalLM
        from trl import DistillationConfig

        args = DistillationConfig(output_dir=saved_model(family), max_completion_length=8, **COMMON | options)
        own = {"args": args, "teacher_model": AutoModelForCausalLM.from_pretrained(saved_model(teacher))}
    return construct(cls, family, peft=peft, train_dataset=data, eval_dataset=data.select(range(2)), **own)


def result_of(trainer: Any) -> dict[str, Any]:
    """Trains it: {"log": a list of {name: number}, "weights": {name: tensor}} of the whole run."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    kept = [
        {name: x for name, x in entry.items() if not any(part in name for part in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]
    named = dict(trainer.model.named_parameters())
    gathered = contextlib.nullcontext()
    if trainer.is_deepspeed_enabled:
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(named.values()))
    with gathered:
        weights = {name: x.detach().clone() for name, x in named.items() if x.requires_grad}
    return {"log": kept, "weights": weights}


class Case(NamedTuple):
    """A run: what TRL's GRPOConfig, or with a teacher its DistillationConfig, has besides the common arguments."""

    title: str
    options: dict[str, Any]
    family: str = "qwen2"
    teacher: str | None = None


def _option(title: str, family: str = "qwen2", **options: Any) -> Case:
    return Case(title, {"loss_type": "dapo", **options}, family)


_ADAPTIVE = dict(use_adaptive_entropy=True, entropy_coef_delta=0.01, entropy_coef_max=0.05, entropy_target=3.75)
_EVALUATION = dict(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4)
OPTIONS = [
    _option("delta", delta=1.15),
    _option("delta below the bound of the clip", delta=1.05),
    _option("epsilon_high", epsilon_high=0.3),
    _option("KL without bias correction", beta=0.1, use_bias_correction_kl=False),
    _option("reference model that follows", beta=0.1, sync_ref_model=True, ref_model_sync_steps=2),
    _option("off-policy mask", off_policy_mask_threshold=0.05),
    _option("top-entropy quantile", top_entropy_quantile=0.3),
    _option("top-entropy quantile, entropy bonus", top_entropy_quantile=0.3, entropy_coef=0.05, beta=0.05),
    _option("entropy bonus", entropy_coef=0.05),
    _option("entropy bonus, mean over sequences", loss_type="grpo", entropy_coef=0.05),
    _option("adaptive entropy bonus", entropy_coef=0.01, **_ADAPTIVE),
    _option("adaptive entropy bonus, quantile", entropy_coef=0.01, top_entropy_quantile=0.4, **_ADAPTIVE),
    _option("truncated completions masked", mask_truncated_completions=True),
    _option("steps_per_generation 4", steps_per_generation=4),
    _option("on-policy", num_iterations=1),
    _option("evaluation", entropy_coef=0.05, **_EVALUATION),
    _option("evaluation, mean over sequences", loss_type="grpo", importance_sampling_level="sequence", **_EVALUATION),
    _option("gradient checkpointing", gradient_checkpointing=True),
    _option("lm_head in float32", cast_lm_head_to_fp32=True),
    _option("LoRA, reference without it", peft=True, beta=0.1),
    _option("rewards not scaled", scale_rewards="none"),
]
FAMILIES = [
    _option(f"{family}, {level}", family, importance_sampling_level=level, beta=beta)
    for family in ("granite", "gemma2", "cohere", "phi", "mixtral")
    for level, beta in (("token", 0.0), ("sequence", 0.05))
] + [_option("qwen2_moe with auxiliary loss", "qwen2_moe", router_aux_loss_coef=0.1)]
TYPES = [
    Case(f"{loss_type}, {level}, beta {beta}", dict(loss_type=loss_type, importance_sampling_level=level, beta=beta))
    for loss_type, level, beta in itertools.product(LOSS_TYPES, LEVELS, (0.0, 0.1))
]
PROCESSES = [
    *(_option(f"{name}, two processes", loss_type=name, beta=0.1) for name in LOSS_TYPES),
    _option("top-entropy quantile, two processes", top_entropy_quantile=0.3, entropy_coef=0.05),
    _option("adaptive entropy bonus, two processes", entropy_coef=0.01, **_ADAPTIVE),
    _option("two processes, level sequence", loss_type="grpo", importance_sampling_level="sequence"),
]
DISTILLATION = [  # of a student whose logits have a scale
    Case("forward KL, evaluation", dict(beta=0.0, **_EVALUATION), "granite", teacher="qwen2"),
    Case("JSD", dict(beta=0.3, temperature=0.7), "granite", teacher="qwen2"),
    Case("reverse KL, a softcap", dict(beta=1.0), "granite", teacher="gemma2"),
    Case("LoRA, a scale", dict(beta=0.5, peft=True), "granite", teacher="cohere"),
    Case("JSD, two processes", dict(beta=0.5), "granite", teacher="qwen2"),
]
CASES = {case.title: case for case in (*TYPES, *OPTIONS, *FAMILIES, *PROCESSES)}


def trainer_class(name: str, distils: bool = False) -> Any:
    """The trainer of "trl", "fused", or "patched", which is TRL's own with its head replaced."""
    import trl

    from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl
    from grpo_kernels.integrations.trl_distillation import FusedDistillationTrainer

    if name == "fused":
        return FusedDistillationTrainer if distils else FusedGRPOTrainer
    if name == "patched":
        patch_trl()
    return trl.DistillationTrainer if distils else trl.GRPOTrainer


def run(name: str, case: Case) -> dict[str, Any]:
    """What `result_of` returns, of this trainer in this process."""
    from grpo_kernels.integrations.trl import unpatch_trl

    cls = trainer_class(name, case.teacher is not None)
    try:
        return result_of(make_trainer(cls, case.family, case.options, case.teacher))
    finally:
        unpatch_trl()


Results = dict[tuple[str, str], dict[str, Any]]  # by trainer and title


def run_processes(names: Sequence[str], cases: list[Case], more: Callable[[Results], None] | None = None) -> Results:
    """Results of rank 0, of runs of two processes, which then call more(results)."""
    models = {family: saved_model(family) for case in cases for family in (case.family, case.teacher) if family}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.pt"
        run_ranks(partial(_run_all, names=names, cases=cases, models=models, path=path, more=more), 2, Path(folder))
        found: Results = torch.load(path)
        return found


def _run_all(rank: int, group: Any, *, names: Any, cases: Any, models: dict[str, str], path: Path, more: Any) -> None:
    global saved_model
    saved_model = models.__getitem__  # in a process group rank 0 alone would write one
    AcceleratorState._reset_state(reset_partial_state=True)  # which a fork has of its parent
    results = {(name, case.title): run(name, case) for name, case in itertools.product(names, cases)}
    if rank == 0:
        torch.save(results, path)
    if more:
        more(results)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float]:
    """(largest relative difference of a logged number, of a weight tensor); the names must be the same."""
    numbers, weights = [0.0], []
    assert len(found["log"]) == len(expected["log"])
    for mine, other in zip(found["log"], expected["log"], strict=True):
        assert mine.keys() == other.keys(), mine.keys() ^ other.keys()
        for name, x in other.items():
            if not isinstance(x, (int, float)):
                assert mine[name] == x, name
            elif x != mine[name] and not (math.isnan(x) and math.isnan(mine[name])):
                numbers.append(abs(mine[name] - x) / max(abs(x), 1e-2))
    for name, x in expected["weights"].items():
        weights.append(((found["weights"][name] - x).norm() / x.norm().clamp(min=5e-3)).item())
    number, weight = (max(math.inf if math.isnan(x) else x for x in errors) for errors in (numbers, weights))
    return number, weight


def clipped(result: dict[str, Any]) -> float:
    """The largest share of clipped ratios that was logged."""
    names = ("clip_ratio/region_mean", "cispo_clip_ratio")
    return max(float(entry.get(name, 0.0)) for entry in result["log"] for name in names)


def table() -> str:
    names = ("trl", "fused", "patched")
    rows = ["| run | model | fused: numbers | weights | patched: numbers | weights |", "|---|---|---|---|---|---|"]
    together = run_processes(names, PROCESSES)
    for case in CASES.values():
        found = {name: together.get((name, case.title)) or run(name, case) for name in names}
        cells = []
        for name in names[1:]:
            errors = differences(found[name], found["trl"])
            assert max(errors) < TOLERANCE, (case, name, errors)
            cells += [f"{x:.0e}" for x in errors]
        rows.append(f"| {case.title} | {case.family} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    found = table()
    if arguments == ["--write"]:
        text = README.read_text(encoding="utf-8")
        before, after = text.split("<!-- table -->")[0], text.split("<!-- end of table -->")[1]
        README.write_text(f"{before}<!-- table -->\n\n{found}\n\n<!-- end of table -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
