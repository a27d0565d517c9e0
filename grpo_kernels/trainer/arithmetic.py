"""The generated task: two-digit addition, the sum written ones first, as one adds by hand: "37+58=" goes on with "59".

Its tokenizer, its problems, and a small Llama warmed up on demonstrations, from which training starts. All of it is
made here: no network is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from .data import take
from .files import write_atomically
from .tasks import arithmetic

EOS_ID = 0
EOS = "<eos>"
CHARACTERS = "0123456789+="
PROMPT_LENGTH = 6
MAX_COMPLETION_LENGTH = 5  # three digits, the end, and one to spare: a completion can be too long
CONTEXT = 32

WARMUP_STEPS = 800  # at most
WARMUP_BATCH = 192
WARMUP_RATE = 1e-3
WARMUP_LOSS = 0.22  # nats per token at which it ends; 0.15 remain, since nothing tells which teacher comes next
CAREFUL_SHARE = 0.3  # of the demonstrations; the other teacher forgets to carry


def tokenizer(vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token per character; `decode` gives each id a text of its own, those of no character
    included.

    Padding is the end of sequence, as in many chat models: a completion is masked by position, never by id, and there
    is no padding id that could vanish from the middle of a decoded completion.
    """
    used = [EOS, *CHARACTERS, "?"]
    tokens = [*used, *(f"<unused{i}>" for i in range(len(used), vocab_size))]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=EOS, pad_token=EOS, padding_side="left", clean_up_tokenization_spaces=False
    )


def start_model(
    folder: str | Path, *, seed: int, vocab_size: int = 2048, hidden_size: int = 128, num_layers: int = 2,
    max_steps: int = WARMUP_STEPS, quiet: bool = False,
) -> None:  # fmt: skip
    """Makes a model and its tokenizer, warms the model up, and saves both into `folder`.

    The folder appears when it is complete. The same seed gives the same bits (on one machine, with the same number of
    threads); the global random numbers stay as they are.
    """
    words = tokenizer(vocab_size)
    config = LlamaConfig(  # most of the ids never occur, but every softmax runs over them, as over a real vocabulary
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_attention_heads=4,
        num_hidden_layers=num_layers, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        pad_token_id=EOS_ID, bos_token_id=None, eos_token_id=EOS_ID,
        initializer_range=hidden_size**-0.5,  # 0.02, the default, suits wider models and starts slowly here
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        _warm_up(model, words, seed, max_steps=max_steps, quiet=quiet)
    transformers_logging.disable_progress_bar()  # one per file that is written
    write_atomically(Path(folder), lambda partial: (model.save_pretrained(partial), words.save_pretrained(partial)))


def careless_answer(prompt: str) -> str:
    """Returns the sum digit by digit without carrying: right for 3 problems in 10."""
    a, b = (int(x) for x in prompt.rstrip("=").split("+"))
    tens, ones = (a // 10 + b // 10) % 10, (a + b) % 10
    return str(10 * tens + ones)[::-1]


def _warm_up(
    model: LlamaForCausalLM, words: PreTrainedTokenizerFast, seed: int, *, max_steps: int, quiet: bool
) -> None:
    """Trains the next token of demonstrations, of which a share CAREFUL_SHARE is right and the others forget to carry.

    The model learns both ways and prefers the wrong one: greedy decoding solves what needs no carry, 3 problems in
    10, and samples hold right and wrong answers, which is what GRPO learns from. Ends when the smoothed loss reaches
    WARMUP_LOSS, since when the model understands the task varies from seed to seed.
    """
    rows, _ = arithmetic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    smoothed = None
    if not quiet:
        print("making a small model that adds without carrying, to start from", file=sys.stderr)
    bar = tqdm(range(max_steps), desc="warm-up", disable=quiet or None)  # None: where stderr is no terminal
    for step in bar:
        batch = [rows[i] for i in take(len(rows), step * WARMUP_BATCH, WARMUP_BATCH, seed)]
        ids, labels = _demonstrations(batch, words)
        logits: Any = model(input_ids=ids, use_cache=False, logits_to_keep=MAX_COMPLETION_LENGTH + 1).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smoothed = loss.item() if smoothed is None else 0.9 * smoothed + 0.1 * loss.item()
        bar.set_postfix(loss=f"{smoothed:.3f}")
        if bar.disable and not quiet and step % 100 == 99:
            print(f"warm-up: step {step + 1}, loss {smoothed:.2f}, down to {WARMUP_LOSS}", file=sys.stderr)
        if smoothed < WARMUP_LOSS:
            break
    bar.close()


def _demonstrations(batch: list[dict[str, str]], words: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Returns (ids (B, PROMPT_LENGTH + MAX_COMPLETION_LENGTH), labels (B, MAX_COMPLETION_LENGTH), -100 after the
    end)."""
    careful = (torch.rand(len(batch)) < CAREFUL_SHARE).tolist()
    answers = [
        row["answer"] if right else careless_answer(row["prompt"]) for row, right in zip(batch, careful, strict=True)
    ]
    encoded = [[*words(answer)["input_ids"], EOS_ID] for answer in answers]
    labels = torch.tensor([ids + [-100] * (MAX_COMPLETION_LENGTH - len(ids)) for ids in encoded])
    prompts = torch.tensor(words([row["prompt"] for row in batch])["input_ids"])
    return torch.cat([prompts, labels.clamp(min=EOS_ID)], dim=1), labels
