"""Hidden states of SmolLM2-135M-Instruct and the ids that it sampled: the inputs of cases with a temperature."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...trainer.files import replacing

WORDS = ["sea", "war", "tea", "sun", "gold", "law", "rain", "time", "snow", "fish", "bread", "milk"]
PROMPT = "Write a short story about {}."
LENGTH = 128  # tokens of a completion, at most


def chat_samples(tokens: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states (tokens, 576), weight (49152, 576), both float32, and ids (tokens,) int64.

    The first call, of any process, writes hidden states and ids to a file beside the model; later ones read it.
    ImportError where the model's package is missing.
    """
    lm, tokenizer = chat_model()
    folder = Path(lm.name_or_path)
    key = hashlib.sha256(repr((PROMPT, WORDS, LENGTH, tokens, temperature)).encode()).hexdigest()[:12]
    file = folder.with_name(f"{folder.name}-samples-{key}.pt")
    if not file.exists():
        torch.manual_seed(0)
        hidden: list[Tensor] = []
        ids: list[int] = []
        while len(ids) < tokens:
            prompts, texts = stories(lm, tokenizer, temperature)
            hidden.append(states(lm, prompts, texts))
            ids += itertools.chain.from_iterable(texts)
        with replacing(file) as draft:
            torch.save((torch.cat(hidden)[:tokens].clone(), torch.tensor(ids[:tokens])), draft)
    all_hidden, all_ids = torch.load(file, weights_only=True)
    return all_hidden, lm.get_output_embeddings().weight.detach(), all_ids


def chat_model() -> tuple[Any, Any]:
    """Returns SmolLM2-135M-Instruct in float32 and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ...trainer.demo import smollm2

    folder = smollm2()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return lm, AutoTokenizer.from_pretrained(folder)


def stories(lm: Any, tokenizer: Any, temperature: float = 1.0) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the ids of a prompt about each of WORDS, and those of its completion."""
    from ...trainer.arguments import TrainArguments
    from ...trainer.sampling import generate

    chats = [[{"role": "user", "content": PROMPT.format(word)}] for word in WORDS]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    arguments = TrainArguments(max_completion_length=LENGTH, temperature=temperature)
    completions = generate(lm, prompts, arguments, ends=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id)
    return prompts, [completion.ids for completion in completions]


@torch.no_grad()
def states(lm: Any, prompts: list[list[int]], texts: list[list[int]]) -> Tensor:
    """Returns the hidden states (N, H) from which the ids of the texts are predicted, one text after another."""
    rows = [
        lm.model(torch.tensor([prompt + text])).last_hidden_state[0, len(prompt) - 1 : -1]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return torch.cat(rows)
