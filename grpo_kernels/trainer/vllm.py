"""Completions from vLLM (0.32 and later), in the processes and on the GPUs of the training."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import RunError
from .arguments import TrainArguments
from .ranks import whole
from .rollout import Sampled


class VLLM:
    """An engine in each process, which gets the policy's weights before it samples after an update.

    Making one raises ValueError where there is no vLLM, RunError with the engine's own reason where it refuses.
    """

    def __init__(self, source: str, arguments: TrainArguments):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's model is in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns at each load that some layers have no weights
        try:
            import vllm
        except ImportError as error:  # of a package that it needs
            raise ValueError(f"use_vllm: {error}") from None
        self._vllm = vllm
        self._arguments = a = arguments
        self._step: int | None = None
        settings: dict[str, Any] = {
            "model": source, "dtype": "bfloat16" if a.bf16 else a.dtype, "seed": a.seed,
            "trust_remote_code": a.trust_remote_code,
            "tensor_parallel_size": 1,  # each process samples prompts of its own
            # Under torchrun each process has an engine of its own; this launcher takes RANK and others from there.
            "distributed_executor_backend": "external_launcher" if "RANK" in os.environ else None,
            "generation_config": "vllm",  # not that of the model
            "logprobs_mode": "processed_logprobs",  # after the temperature and over the kept ids, as the loss has them
            **({"return_sampling_mask": True} if a.truncates else {}),
        }  # fmt: skip
        further = a.vllm_kwargs or {}
        if twice := settings.keys() & further.keys():
            raise ValueError(f"vllm_kwargs={a.vllm_kwargs}: the trainer sets {', '.join(sorted(twice))} itself")
        with self._reasons():
            self.engine = vllm.LLM(**settings, **{"gpu_memory_utilization": 0.3} | further)

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        """What the engine raises becomes one sentence, with the options that it was given."""
        try:
            yield
        except Exception as error:  # of any type
            given = [name for name in ("vllm_kwargs", "top_p", "top_k", "min_p") if self._arguments.is_given(name)]
            options = ", ".join(f"{name}={getattr(self._arguments, name)!r}" for name in given)
            # pydantic's hold the reason among the values of all fields
            reason = " ".join(e["msg"] for e in error.errors()) if hasattr(error, "errors") else str(error)
            reason = " ".join(f"{type(error).__name__}: {reason}".split())
            raise RunError(f"use_vllm{' with ' * bool(given)}{options}: vLLM says {reason}") from error

    def sample(
        self, lm: Any, prompts: Sequence[list[int]], *, greedy: bool, step: int, ends: Sequence[int]
    ) -> list[Sampled]:
        """One completion per prompt under the weights of `lm` after optimizer step `step`.

        Seeds come from torch's generator, one per completion: those of one prompt would be equal otherwise.
        """
        a = self._arguments
        options = {
            "max_tokens": a.max_completion_length, "n": 1, "repetition_penalty": 1.0, "temperature": a.temperature,
            # Greedy by top_k: for a temperature of 0 there are no sampling masks.
            "top_p": a.top_p, "top_k": 1 if greedy else a.top_k, "min_p": a.min_p,
            "stop_token_ids": list(ends), "logprobs": 0, "detokenize": False,
        }  # fmt: skip
        seeds = torch.randint(2**31, (len(prompts),)).tolist()
        with self._reasons():
            if step != self._step:
                self._load_weights(lm)
                self._step = step
            settings = [self._vllm.SamplingParams(**options, seed=seed) for seed in seeds]
            requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            outputs = [request.outputs[0] for request in self.engine.generate(requests, settings, use_tqdm=False)]
            return [self._sampled(output, set(ends), a.truncates) for output in outputs]

    @staticmethod
    def _sampled(output: Any, ends: set[int], masks: bool) -> Sampled:
        ids = list(output.token_ids)
        logps = [entry[token].logprob if entry and token in entry else math.nan
                 for token, entry in zip(ids, output.logprobs, strict=True)]  # fmt: skip
        kept = [list(map(int, row)) for row in output.sampling_mask.token_ids] if masks else None
        return Sampled(ids, bool(ids) and ids[-1] in ends, torch.tensor(logps, dtype=torch.float32), kept)

    def _load_weights(self, lm: Any) -> None:
        """Give the engine the weights of `lm`, and take away what it made from those before."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": _weights(lm)})
        self.engine.apply_model(_pack_again)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("its cache of prefixes, which are those of earlier weights, could not be reset")

    def close(self) -> None:
        """End the engine. It ends torch's process groups too, and must find them whole."""
        self.engine.llm_engine.engine_core.shutdown()


@torch.no_grad()
def _weights(lm: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of a checkpoint and whole parameters, W + s B A for LoRA, one at a time."""
    modules = dict(lm.named_modules())
    for name, parameter in lm.named_parameters():
        if "lora_" in name or ".original_module." in name:
            continue
        value = whole(parameter.detach())
        layer: Any = modules.get(name.removesuffix(".base_layer.weight"))
        if name.endswith(".base_layer.weight") and hasattr(layer, "get_delta_weight"):
            for adapter in layer.active_adapters:
                value = value + whole(layer.get_delta_weight(adapter)).to(value.dtype)
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")  # without PEFT's wrappers
        yield plain.replace(".modules_to_save.default", ""), value


def check_adapter(lm: Any) -> None:
    """Raise ValueError where `_weights` does not have all that an adapter trains."""
    names = {name for name, _ in lm.named_parameters()}
    for name, parameter in lm.named_parameters():
        matrix = re.fullmatch(r"(.+)\.lora_(embedding_)?[AB]\.\w+(\.weight)?", name)
        of_lora = matrix is not None and f"{matrix[1]}.base_layer.weight" in names
        if parameter.requires_grad and not (of_lora or ".modules_to_save." in name):
            raise ValueError(
                f"use_vllm with an adapter that trains {name}; expected LoRA's two matrices to weights of layers, and "
                "modules_to_save: nothing else is passed to vLLM"
            )


def _pack_again(model: torch.nn.Module) -> None:
    """On a CPU the engine multiplies by packed copies of weights. reload_weights makes them anew with the weights of
    their layer; a head that is tied to the embeddings has none of its own."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
