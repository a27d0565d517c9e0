"""A random Llama of 74,000 parameters, to try a trainer without a download.

    python examples/random_model.py FOLDER [SEED]

Its tokenizer has an id for each byte.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save(folder, seed=0):
    tokens = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    save(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"saved in {sys.argv[1]}")
