"""Seconds of sampling and of a step of `grpo-kernels train`: the plain loop, CUDA graphs, vLLM where it is installed.

    python bench/sampling.py --device cuda --output bench/results/gpu/h100-sampling.json
    python bench/sampling.py                # a rehearsal: tiny, on the CPU, where the static cache has no graphs

A Qwen2 of the 0.5B model's shape with random weights in bfloat16, prompts of 64 to 128 tokens with eight completions
each, which have 128 tokens, as none ends. The first call of each way is apart, since graphs are captured in it; then
they take turns. What is worth most comes first, and the file is written after each part.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_kernels.commands.bench.machine import describe, environment, synchronize, write
from grpo_kernels.commands.env import package_version
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.data import GIVEN_ROWS
from grpo_kernels.trainer.decoding import Decoder, StaticDecoder, decoding_error
from grpo_kernels.trainer.loop import Trainer
from grpo_kernels.trainer.run import Given, open_run
from grpo_kernels.trainer.sampling import generate
from grpo_kernels.trainer.vllm import VLLM

GENERATIONS = 8  # of a prompt
NAMES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
SHAPES = {"cpu": (512, 32, 64, 2, 4), "cuda": (151936, 896, 4864, 24, 14)}
# Batches in the order of their worth, tokens of a completion, of the shortest and the longest prompt.
SIZES = {"cpu": ((16, 8), 6, (4, 8)), "cuda": ((64, 256, 16), 128, (64, 128))}
STEPS = 6  # of `train`


def make_model(device: str) -> Any:
    config = Qwen2Config(
        **dict(zip(NAMES, SHAPES[device], strict=True)), num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def make_tokenizer(vocab_size: int) -> Any:
    """A word per id."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def make_prompts(device: str, rows: int) -> list[list[int]]:
    draw, (shortest, longest) = random.Random(0), SIZES[device][2]
    distinct = [
        [draw.randrange(2, SHAPES[device][0]) for _ in range(draw.randint(shortest, longest))]
        for _ in range(rows // GENERATIONS)
    ]
    return [prompt for prompt in distinct for _ in range(GENERATIONS)]


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    synchronize(device)
    begin = time.perf_counter()
    found = call()
    synchronize(device)
    return time.perf_counter() - begin, found


def measure(lm: Any, ways: dict[str, Callable[[], list[Any]]], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sample in ways.items():
        seconds, sampled = timed(sample, lm.device)
        tokens = [len(s.ids) for s in sampled]
        found[name] = {"first_seconds": seconds, "tokens": sum(tokens), "seconds": []}
    for _ in range(rounds):
        for name, sample in ways.items():
            found[name]["seconds"].append(timed(sample, lm.device)[0])
    for report in found.values():
        report["milliseconds_per_token"] = 1e3 * statistics.median(report["seconds"]) / max(tokens)
    return found


def by_transformers(lm: Any, device: str, rows: int, rounds: int) -> dict[str, Any]:
    """The plain loop and CUDA graphs; on a CPU the same cache without graphs."""
    length = SIZES[device][1]
    a, prompts = TrainArguments(max_completion_length=length), make_prompts(device, rows)
    decoders = {"plain": Decoder(lm), "graphs": StaticDecoder(lm, rows=rows, new_tokens=length)}
    errors = {name: decoding_error(decoder) for name, decoder in decoders.items()}
    ways = {n: partial(generate, lm, prompts, a, ends=[], pad_id=0, decoder=d) for n, d in decoders.items()}
    found = measure(lm, {n: way for n, way in ways.items() if errors[n].error <= 1}, rounds)
    for name, error in errors.items():
        found.setdefault(name, {})["check"] = error._asdict()
    static = decoders["graphs"]
    found["graphs"] |= {
        "graphs": len(static.steps), "graph_bytes": static.graph_bytes,
        "cache_bytes": sum(tensor.nbytes for tensor in static.stored),
    }  # fmt: skip
    return found


def by_vllm(lm: Any, device: str, rounds: int) -> dict[str, Any]:
    """By the number of rows; the weights are passed with the first call."""
    batches, length, (_, longest) = SIZES[device]
    options = {"skip_tokenizer_init": True, "max_model_len": longest + length}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        a = TrainArguments(dtype="bfloat16", max_completion_length=length, use_vllm=True, vllm_kwargs=options)
        engine = VLLM(folder, a)
        for rows in batches:
            call = partial(engine.sample, lm, make_prompts(device, rows), greedy=False, step=0, ends=[])
            found[str(rows)] = measure(lm, {"vllm": call}, rounds)["vllm"]
        engine.close()
    return found


def train_steps(lm: Any, device: str) -> dict[str, Any]:
    """Seconds of rollouts and updates of `train`, the first apart."""
    (rows, *_), length, _ = SIZES[device]
    prompts = [{"prompt": " ".join(f"w{i}" for i in ids)} for ids in make_prompts(device, rows)[::GENERATIONS]]
    with tempfile.TemporaryDirectory() as folder:
        a = TrainArguments(
            output_dir=f"{folder}/run", dataset_name=GIVEN_ROWS[0], reward_funcs=["sampling:rewards"], max_steps=STEPS,
            model_name_or_path="random weights", dtype="bfloat16", num_generations=GENERATIONS, beta=0.0,
            per_device_train_batch_size=rows, max_completion_length=length, save_steps=0, use_cpu=device == "cpu",
        )  # fmt: skip
        run = open_run(a, Given({GIVEN_ROWS[0]: prompts}, [rewards], make_tokenizer(SHAPES[device][0]), lm))
        trainer = Trainer(run)
        run.log.start(0, {})
        calls = [timed(call, lm.device)[0] for _ in range(STEPS) for call in (trainer.collect, trainer.update)]
        run.close()
    rollouts, updates, decoder = calls[::2], calls[1::2], run.bare_policy.decoder
    return {
        "rows": rows, "rollout_seconds": rollouts, "update_seconds": updates, "memory": decoder.memory,
        "decoder": type(decoder).__name__,
        "step_seconds": statistics.median(map(sum, zip(rollouts[1:], updates[1:], strict=True))),
    }  # fmt: skip


def rewards(completions: list[str], **columns: Any) -> list[float]:
    return [float(zlib.crc32(text.encode()) % 7) for text in completions]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/sampling.json"))
    chosen = parser.parse_args(argv)
    device, rounds, lm = chosen.device, chosen.rounds, make_model(chosen.device)
    (first, *others), length, prompts = SIZES[device]
    settings = {"dtype": "bfloat16", "length": length, "prompts": prompts, "generations": GENERATIONS, "rounds": rounds}
    data: dict[str, Any] = {"environment": environment(torch.device(device)), "sampling": {}}
    data["settings"] = dict(zip(NAMES, SHAPES[device], strict=True)) | settings
    data["environment"]["versions"]["vllm"] = package_version("vllm")
    sampling = {str(rows): partial(by_transformers, lm, device, rows, rounds) for rows in (first, *others)}
    parts = {str(first): sampling[str(first)], "train": partial(train_steps, lm, device), **sampling}
    if data["environment"]["versions"]["vllm"]:
        parts["vllm"] = partial(by_vllm, lm, device, rounds)
    failed = False
    for name, part in parts.items():
        try:
            found = part()
        except Exception as error:  # the other parts are measured all the same
            traceback.print_exc()
            found, failed = {"error": describe(error)}, True
        (data["sampling"] if name in sampling else data)[name] = found
        print(name, json.dumps(found), flush=True)
        write(chosen.output, data)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
