"""The model: a small Llama with random weights, built from a transformers configuration."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from .task import EOS_ID, MAX_COMPLETION_LENGTH, NUM_IDS, PAD_ID, PROMPT_LENGTH


def build_model(
    *, vocab_size: int, hidden_size: int, num_layers: int, seed: int, device: torch.device
) -> LlamaForCausalLM:
    """A float32 Llama with its own lm_head (vocab_size, hidden_size).

    The task has `NUM_IDS` ids; the other rows of the lm_head are never in the data, but every softmax, sample and
    gradient runs over them, as it does over the vocabulary of a real model.
    """
    if vocab_size < NUM_IDS:
        raise ValueError(f"vocab_size={vocab_size}; the task needs at least {NUM_IDS}")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=PROMPT_LENGTH + MAX_COMPLETION_LENGTH,
        initializer_range=hidden_size**-0.5,  # 0.02, the default, suits wider models and starts slowly here
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )
    torch.manual_seed(seed)
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    return model


def lm_head_weight(model: LlamaForCausalLM) -> Tensor:
    """(V, H)"""
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def completion_hidden(model: LlamaForCausalLM, prompt_ids: Tensor, completion_ids: Tensor) -> Tensor:
    """(B, T, H): the rows of the last hidden state that predict completion_ids (B, T); a view, not a copy.

    Padding comes after the completion only, so causal attention alone hides it.
    """
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[:, prompt_ids.shape[1] - 1 : -1]


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompt_ids: Tensor, *, greedy: bool = False) -> Tensor:
    """(B, T) completions, T <= MAX_COMPLETION_LENGTH, padded after their end.

    Samples come from the policy exactly as the loss scores it: temperature 1, no top-k, no top-p.
    """
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=MAX_COMPLETION_LENGTH, pad_token_id=PAD_ID, eos_token_id=EOS_ID, use_cache=True, **how
    )
    sampler: Any = model  # generate's annotations do not accept the models that have it
    ids: Tensor = sampler.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), generation_config=config)
    return ids[:, prompt_ids.shape[1] :]
