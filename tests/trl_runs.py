"""Short training runs of TRL's trainers on a tiny model, with the logged numbers and the final weights.

A script under torchrun too, for runs of several processes: python tests/trl_runs.py FOLDER CASE writes FOLDER/result.pt.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, tiny_model

NOT_COMPARED = ("runtime", "per_second", "step_time", "flos", "num_tokens")  # times, and what does not depend on the loss


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCAB))])}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@lru_cache
def saved_model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    """A folder with a tiny model: TRL reads the reference model from there."""
    folder = tempfile.mkdtemp(prefix="grpo_kernels_")
    model = tiny_model(family, dtype=dtype, **options)
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


def arguments(folder: str, **options: Any) -> Any:
    from trl import GRPOConfig

    common = dict(
        output_dir=folder, per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2,
        num_iterations=2, max_completion_length=8, max_steps=8, logging_steps=1, optim="sgd", learning_rate=0.3,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, temperature=0.9, epsilon=0.1, seed=5,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOConfig(**{**common, **options})


def make_trainer(cls: Any, family: str, options: dict[str, Any], model: dict[str, Any] | None = None) -> Any:
    """A trainer of this class; `options` of its GRPOConfig, of which peft makes it train an adapter."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    options = dict(options)
    folder, adapter = saved_model(family, **(model or {})), options.pop("peft", None)
    extra = {}
    if adapter:
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    args = arguments(folder, **options)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    data = prompts()
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(
            model=loaded, args=args, reward_funcs=reward, train_dataset=data, eval_dataset=data.select(range(2)),
            processing_class=tokenizer(), **extra,
        )  # fmt: skip


def train(cls: Any, family: str, options: dict[str, Any], model: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"log": a list of {name: number}, "weights": {name: tensor}} of a whole run."""
    trainer = make_trainer(cls, family, options, model)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    kept = [
        {name: x for name, x in entry.items() if not any(part in name for part in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]
    weights = {name: x.detach().clone() for name, x in trainer.model.named_parameters() if x.requires_grad}
    return {"log": kept, "weights": weights}


def trainer_class(name: str) -> Any:
    if name == "trl":
        from trl import GRPOTrainer

        return GRPOTrainer
    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    return FusedGRPOTrainer


def differences(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float]:
    """(largest relative difference of a logged number, of a weight tensor); the names must be the same."""
    number = weight = 0.0
    assert len(found["log"]) == len(expected["log"])
    for mine, other in zip(found["log"], expected["log"], strict=True):
        assert mine.keys() == other.keys(), mine.keys() ^ other.keys()
        for name, x in other.items():
            if not isinstance(x, (int, float)):
                assert mine[name] == x, name
            elif x != mine[name]:
                number = max(number, abs(mine[name] - x) / max(abs(x), 1e-2))
    for name, x in expected["weights"].items():
        weight = max(weight, ((found["weights"][name] - x).norm() / x.norm()).item())
    return number, weight


if __name__ == "__main__":
    target, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    result = train(trainer_class(case["trainer"]), case["family"], case["options"])
    if torch.distributed.get_rank() == 0:
        torch.save(result, target / "result.pt")
    torch.distributed.destroy_process_group()
