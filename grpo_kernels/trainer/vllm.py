"""Completions from vLLM, in the processes and on the GPUs of the training; needs `pip install vllm`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .arguments import TrainArguments
from .rollout import Sampled


class VLLM:
    """An engine in each process, which gets the policy's weights before it samples after an update."""

    def __init__(self, source: str, arguments: TrainArguments):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine's model is in this process
        try:
            import vllm
        except ImportError:
            raise ValueError("use_vllm needs vLLM: pip install vllm") from None
        self._vllm, self._arguments = vllm, arguments
        self._step: int | None = None
        self.engine = vllm.LLM(
            model=source, dtype="bfloat16" if arguments.bf16 else arguments.dtype, seed=arguments.seed,
            gpu_memory_utilization=arguments.vllm_gpu_memory_utilization, trust_remote_code=arguments.trust_remote_code,
            # Under torchrun each process has an engine of its own; this launcher takes RANK and others from there.
            distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
            generation_config="vllm",  # not that of the model
            logprobs_mode="processed_logprobs",  # after the temperature, as the loss has them
        )  # fmt: skip

    def sample(
        self, lm: Any, prompts: Sequence[list[int]], *, greedy: bool, step: int, ends: Sequence[int]
    ) -> list[Sampled]:
        """One completion per prompt under the weights of `lm` after optimizer step `step`.

        Seeds come from torch's generator, one per completion: those of one prompt would be equal otherwise.
        """
        if step != self._step:
            self._load_weights(lm)
            self._step = step
        options = {
            "max_tokens": self._arguments.max_completion_length, "top_p": 1.0, "n": 1, "repetition_penalty": 1.0,
            "temperature": 0.0 if greedy else self._arguments.temperature, "stop_token_ids": list(ends), "logprobs": 0,
            "detokenize": False,
        }  # fmt: skip
        seeds = torch.randint(2**31, (len(prompts),)).tolist()
        settings = [self._vllm.SamplingParams(**options, seed=seed) for seed in seeds]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = [request.outputs[0] for request in self.engine.generate(requests, settings, use_tqdm=False)]
        return [self._sampled(output, set(ends)) for output in outputs]

    @staticmethod
    def _sampled(output: Any, ends: set[int]) -> Sampled:
        ids = list(output.token_ids)
        logps = [entry[token].logprob if entry and token in entry else math.nan
                 for token, entry in zip(ids, output.logprobs, strict=True)]  # fmt: skip
        return Sampled(ids, bool(ids) and ids[-1] in ends, torch.tensor(logps, dtype=torch.float32), None)

    @torch.no_grad()
    def _load_weights(self, lm: Any) -> None:
        """Give the engine whole parameters, W + s B A for LoRA; its cache of prefixes belongs to the weights before."""
        modules = dict(lm.named_modules())
        weights = []
        for name, parameter in lm.named_parameters():
            if "lora_" in name or ".original_module." in name:
                continue
            whole = _whole(parameter)
            layer: Any = modules.get(name.removesuffix(".base_layer.weight"))
            if name.endswith(".base_layer.weight") and hasattr(layer, "get_delta_weight"):
                for adapter in layer.active_adapters:
                    whole = whole + _whole(layer.get_delta_weight(adapter)).to(whole.dtype)
            weights.append((_plain_name(name), whole))
        self.engine.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(weights)
        self.engine.reset_prefix_cache()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _plain_name(name: str) -> str:
    """The name of a parameter without PEFT's wrappers."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return name.replace(".modules_to_save.default", "")
