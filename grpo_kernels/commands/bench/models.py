"""A whole model with the head of a case: a Llama with random weights, and a tokenizer with a word for each id."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .baselines import Unsupported
from .inputs import Inputs


class Layers(NamedTuple):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int


# By hidden size: four layers of SmolLM2-135M, which a CPU computes in seconds; all layers of Qwen2.5-0.5B.
LAYERS = {64: Layers(128, 1, 1, 1), 576: Layers(1536, 9, 3, 4), 896: Layers(4864, 14, 2, 24)}
PAD, END = 0, 1


def make_model(inputs: Inputs) -> Any:
    """Returns a Llama with random weights whose head has the inputs' shape and type; `Unsupported` for other sizes.

    It has no id that ends a completion: an engine would stop there by itself, and have fewer tokens to sample.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size, hidden_size = inputs.weight.shape
    if hidden_size not in LAYERS:
        raise Unsupported(f"knows the layers of models with hidden sizes {', '.join(map(str, LAYERS))}")
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, **LAYERS[hidden_size]._asdict(), tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=None, max_position_embeddings=2 * inputs.ids.shape[1],
    )  # fmt: skip
    torch.manual_seed(0)
    with inputs.hidden.device:
        model: Any = LlamaForCausalLM(config)
    return model.to(inputs.hidden.dtype)


def make_tokenizer(words: dict[str, int]) -> Any:
    """Returns a tokenizer that splits text at white space and looks its words up."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": END} | words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
