"""Completions from vLLM (0.32 and later), in the processes and on the GPUs of the training."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import RunError
from .arguments import TrainArguments
from .ranks import whole
from .rollout import Sampled


class VLLM:
    """An engine in each process, which gets the policy's weights before it samples after an update.

    lm: the policy, before it is distributed; length: tokens of the longest prompt and completion, the default of
    max_model_len, by which vLLM chooses rotary frequencies. other_types: in words, what of the engine's types is not
    the policy's.
    Making one raises ValueError where there is no vLLM, RunError with the engine's own reason where it refuses.
    """

    def __init__(self, source: str, arguments: TrainArguments, lm: Any, length: int):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's model is in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns at each load that some layers have no weights
        try:
            import vllm
        except ImportError as error:  # of a package that it needs
            raise ValueError(f"use_vllm: {error}") from None
        self._vllm = vllm
        self._arguments = a = arguments
        self._step: int | None = None
        self._unties = not head_is_embedding(lm) and bool(
            getattr(_without_peft(lm).config.get_text_config(), "tie_word_embeddings", False)
        )
        further = a.vllm_kwargs or {}
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
        overrides: dict[str, Any] = {"head_dtype": "float32"}  # of logits, as the loss has them
        if self._unties:  # else vLLM takes the embedding for the head, as the configuration of the model has it
            overrides["tie_word_embeddings"] = False
        hf_overrides = further.get("hf_overrides", {})
        if not isinstance(hf_overrides, dict):
            raise TypeError(f"vllm_kwargs: hf_overrides is a {type(hf_overrides).__name__}; expected a dict")
        if twice := settings.keys() & further.keys() | overrides.keys() & hf_overrides.keys():
            raise ValueError(f"vllm_kwargs={a.vllm_kwargs}: the trainer sets {', '.join(sorted(twice))} itself")
        settings |= {
            "gpu_memory_utilization": 0.3,
            "max_model_len": length,
            **further,
            "hf_overrides": hf_overrides | overrides,
        }
        types = [name for name in ("quantization", "kv_cache_dtype") if name in further]
        self.other_types = [f"{name}={further[name]!r}" for name in types]
        with self._reasons():
            self.engine = vllm.LLM(**settings)
            ((head_dtype, is_tied),) = self.engine.apply_model(_head)
        if self._unties and is_tied:
            raise RunError(
                "use_vllm: this model ties lm_head and embedding, vLLM whatever its configuration says; expected one "
                "weight: an adapter of neither, or one with ensure_weight_tying"
            )
        if head_dtype != torch.float32:
            self.other_types.append(f"logits in {str(head_dtype).removeprefix('torch.')}")
            print(
                f"use_vllm: this vLLM computes {self.other_types[-1]} (it has no head_dtype here), the loss in float32",
                file=sys.stderr,
            )

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        """Makes of what the engine raises one sentence, with the options that it was given."""
        try:
            yield
        except Exception as error:  # of any type
            options = [name for name in ("vllm_kwargs", "top_p", "top_k", "min_p") if self._arguments.is_given(name)]
            words = [f"{name}={getattr(self._arguments, name)!r}" for name in options]
            if self._unties:  # because of an adapter, which is no option of vLLM
                words.append("tie_word_embeddings=False")
            # pydantic's hold the reason among the values of all fields
            reason = " ".join(e["msg"] for e in error.errors()) if hasattr(error, "errors") else str(error)
            reason = " ".join(f"{type(error).__name__}: {reason}".split())
            raise RunError(f"use_vllm{' with ' * bool(words)}{', '.join(words)}: vLLM says {reason}") from error

    def sample(
        self, lm: Any, prompts: Sequence[list[int]], arguments: TrainArguments, *, greedy: bool, step: int,
        ends: Sequence[int],
    ) -> list[Sampled]:  # fmt: skip
        """Returns one completion per prompt under the weights of `lm` after optimizer step `step`.

        Seeds come from torch's generator, one per completion: those of one prompt would be equal otherwise.
        """
        a = arguments
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
        """Gives the engine the weights of `lm`, and takes away what it made from those before."""
        weights = _weights(lm, once=not self._unties)
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.engine.apply_model(_pack_again)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("its cache of prefixes, which are those of earlier weights, could not be reset")

    def close(self) -> None:
        """Ends the engine. It ends torch's process groups too, and must find them whole."""
        self.engine.llm_engine.engine_core.shutdown()


# --- weights ----------------------------------------------------------------------------------------------------------


def head_is_embedding(lm: Any) -> bool:
    """Says whether lm_head and embedding have the same parameters, those of adapters included."""
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()
    parameters = [{p for name, p in end.named_parameters() if name != "bias"} for end in ends]
    return bool(parameters[0] == parameters[1])


@torch.no_grad()
def _weights(lm: Any, *, once: bool) -> Iterator[tuple[str, Tensor]]:
    """Names of a checkpoint and whole parameters, W + s B A for LoRA, one at a time. once: a parameter of several
    modules has the name of the first alone, as in a checkpoint."""
    seen = set()
    for name, parameter, added in _parameters(_without_peft(lm)):
        if once and parameter in seen:
            continue
        seen.add(parameter)
        value = whole(parameter.detach())
        for layer, adapter in added:
            value = value + whole(layer.get_delta_weight(adapter)).to(value.dtype)
        yield name, value


def _without_peft(lm: Any) -> Any:
    return lm.get_base_model() if hasattr(lm, "get_base_model") else lm


def _parameters(module: Any, prefix: str = "") -> Iterator[tuple[str, nn.Parameter, list[tuple[Any, str]]]]:
    """Returns what a model computes with: the name that each parameter has without PEFT's wrappers, and the layers and
    names of the active adapters of LoRA whose product is added to it."""
    if hasattr(module, "original_module"):
        saved = getattr(module, "modules_to_save", {})
        active = [name for name in module.active_adapters if name in saved]
        yield from _parameters(saved[active[0]] if active else module.original_module, prefix)
    elif hasattr(module, "base_layer"):
        layers = [(module, adapter) for adapter in module.active_adapters if _matrices(module, adapter)]
        for name, parameter, added in _parameters(module.base_layer, prefix):
            yield name, parameter, added + layers if name == f"{prefix}weight" else added
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}{name}", parameter, []
        for name, child in module.named_children():
            yield from _parameters(child, f"{prefix}{name}.")


def _matrices(layer: Any, adapter: str) -> list[nn.Parameter]:
    """Returns LoRA's two matrices in a layer; none of another adapter."""
    weights = []
    for name in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        matrices = getattr(layer, name, {})
        if adapter in matrices:
            weights.append(matrices[adapter] if "embedding" in name else matrices[adapter].weight)
    return weights


def check_adapter(lm: Any) -> None:
    """Raises ValueError where `_weights` does not have all that an adapter trains."""
    sent = set()
    for _, parameter, added in _parameters(_without_peft(lm)):
        sent.update([parameter, *(matrix for layer in added for matrix in _matrices(*layer))])
    for name, parameter in lm.named_parameters():
        if parameter.requires_grad and parameter not in sent:
            raise ValueError(
                f"use_vllm with an adapter that trains {name}; expected LoRA's two matrices to weights of layers, and "
                "modules_to_save: nothing else is passed to vLLM"
            )


# --- in the engine ----------------------------------------------------------------------------------------------------


def _head(model: nn.Module) -> tuple[torch.dtype, bool]:
    """Returns the type of the engine's logits, and whether its head is the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    ends: list[Any] = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = {end.weight.data_ptr() for end in ends if isinstance(end, ParallelLMHead)}
    others = {end.weight.data_ptr() for end in ends if not isinstance(end, ParallelLMHead)}
    types: list[Any] = [module.head_dtype for module in model.modules() if hasattr(module, "head_dtype")]
    return types[0] if types else ends[0].weight.dtype, not heads - others


def _pack_again(model: nn.Module) -> None:
    """Packs weights again. On a CPU the engine multiplies by packed copies of weights. reload_weights makes them anew
    with the weights of their layer; a head that is tied to the embeddings has none of its own."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
