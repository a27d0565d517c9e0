"""A tiny chat model for runs of the trainer, with what trips trainers up: padding is the end of sequence, a second id
ends a completion, and its generation_config would change the distribution of samples."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORD_PROBLEMS = Path(__file__).with_name("data") / "word_problems.jsonl"  # in GSM8K's format, written for these tests
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_problems() -> list[dict]:
    return [json.loads(line) for line in WORD_PROBLEMS.read_text(encoding="utf-8").splitlines()]


def tiny_chat(folder: Path, *, seed: int = 0) -> Path:
    """Save a random Llama of 20,000 parameters and a byte-pair tokenizer, trained on the word problems, into `folder`.

    Completions end at "<|im_end|>", which pads too, or at "<|endoftext|>", the second of generation_config.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    texts = [text for row in word_problems() for text in (*(m["content"] for m in row["prompt"]), row["answer"])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=specials[2], pad_token=specials[2], bos_token=specials[1],
        chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip

    config = LlamaConfig(
        vocab_size=words.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.2, attention_dropout=0.1, pad_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.generation_config.update(
        eos_token_id=[2, 0], do_sample=True, top_k=5, top_p=0.5, temperature=0.3, repetition_penalty=1.3
    )
    model.save_pretrained(folder)
    return folder
