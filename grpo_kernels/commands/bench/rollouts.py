"""Sampling, and a step of `grpo-kernels train`: with the plain loop, with CUDA graphs, with vLLM where it is installed.

Prompts have half as many tokens as completions, or up to as many; each has eight completions, which never end early.
Without CUDA the static cache of the graphs is used without graphs.
"""

from __future__ import annotations

import tempfile
import zlib
from functools import partial
from typing import Any

import torch

from .baselines import Implementation, Result, Step
from .inputs import Inputs
from .models import PAD, make_model, make_tokenizer
from .peers import load

GENERATIONS = 8  # completions of a prompt, where the batch has as many


def prompts_of(inputs: Inputs) -> list[list[int]]:
    """Returns the ids of the prompt of each row; GENERATIONS adjacent rows have the same one."""
    rows, length = inputs.ids.shape
    ids = inputs.ids.clamp(min=2).tolist()
    shared = [i // GENERATIONS for i in range(rows)]
    return [ids[i][: length // 2 + i * 7 % (length // 2 + 1)] for i in shared]


def sampling(inputs: Inputs, mode: str, static: bool) -> Step:
    """Returns the step that samples by transformers, with a static cache if `static`. ValueError where the decoder's
    log-probabilities differ from those of one pass over the same ids."""
    from ...trainer.arguments import TrainArguments
    from ...trainer.decoding import Decoder, StaticDecoder, decoding_error
    from ...trainer.sampling import generate

    lm, prompts, (rows, length) = make_model(inputs).eval(), prompts_of(inputs), inputs.ids.shape
    decoder = StaticDecoder(lm, rows=rows, new_tokens=length) if static else Decoder(lm)
    deviation = decoding_error(decoder)
    if deviation.error > 1:
        raise ValueError(f"wrong result: {deviation}")
    arguments = TrainArguments(max_completion_length=length)

    def step(inputs: Inputs) -> Result:
        completions = generate(lm, prompts, arguments, ends=[], pad_id=PAD, decoder=decoder)
        metrics = {"sampling/tokens": sum(len(completion.ids) for completion in completions)}
        if isinstance(decoder, StaticDecoder):
            cache = sum(x.nbytes for x in decoder.cache_tensors)
            metrics |= {"sampling/graphs": len(decoder.steps), "sampling/graph_bytes": decoder.graph_bytes}
            metrics["sampling/cache_bytes"] = cache
        return Result(metrics={name: torch.tensor(value) for name, value in metrics.items()})

    return step


def vllm(inputs: Inputs, mode: str) -> Step:
    """Returns the step that samples by vLLM, to which the first call passes the weights."""
    load("vllm")
    from ...trainer.arguments import TrainArguments
    from ...trainer.vllm import VLLM

    lm, length = make_model(inputs), inputs.ids.shape[1]
    arguments = TrainArguments(
        dtype=_name(inputs.hidden.dtype), max_completion_length=length, use_vllm=True,
        vllm_kwargs={"skip_tokenizer_init": True, "enforce_eager": not inputs.hidden.is_cuda},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        engine = VLLM(folder, arguments, lm, 2 * length)

    def step(inputs: Inputs) -> Result:
        completions = engine.sample(lm, prompts_of(inputs), arguments, greedy=False, step=0, ends=[])
        return Result(metrics={"sampling/tokens": torch.tensor(sum(len(completion.ids) for completion in completions))})

    return step


def train_step(inputs: Inputs, mode: str) -> Step:
    """Returns the step of `grpo-kernels train`: a rollout and an update, with the decoder that it chooses."""
    from ...trainer.arguments import TrainArguments
    from ...trainer.data import GIVEN_ROWS
    from ...trainer.loop import Trainer
    from ...trainer.run import Given, open_run

    rows, length = inputs.ids.shape
    data = [{"prompt": " ".join(f"w{i}" for i in ids)} for ids in prompts_of(inputs)[::GENERATIONS]]
    words = {f"w{i}": i for i in range(2, len(inputs.weight))}
    arguments = TrainArguments(
        output_dir=tempfile.mkdtemp() + "/run", dataset_name=GIVEN_ROWS[0], reward_funcs=["rollouts:rewards"],
        max_steps=10**6, model_name_or_path="random weights", dtype=_name(inputs.hidden.dtype), beta=0.0,
        per_device_train_batch_size=rows, num_generations=min(GENERATIONS, rows), max_completion_length=length,
        save_steps=0, use_cpu=not inputs.hidden.is_cuda,
    )  # fmt: skip
    run = open_run(arguments, Given({GIVEN_ROWS[0]: data}, [rewards], make_tokenizer(words), make_model(inputs)))
    trainer = Trainer(run)
    run.log.start(0, {})

    def step(inputs: Inputs) -> Result:
        trainer.collect()
        trainer.update()
        return Result()

    return step


def _name(dtype: torch.dtype) -> str:
    """Returns the name of a type, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def rewards(completions: list[str], **columns: Any) -> list[float]:
    """Returns rewards from 0 to 6 that depend on the text alone."""
    return [float(zlib.crc32(text.encode()) % 7) for text in completions]


ROLLOUTS = {
    "ours-sampling": Implementation("the plain loop", partial(sampling, static=False), "none", modes=("sampling",)),
    "ours-graphs": Implementation("CUDA graphs", partial(sampling, static=True), "none", modes=("sampling",)),
    "vllm": Implementation("vLLM", vllm, "none", modes=("sampling",)),
    "ours-train": Implementation("grpo-kernels train", train_step, "none", modes=("train",)),
}
