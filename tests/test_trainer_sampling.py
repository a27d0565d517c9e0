"""Sampling by transformers' models: each completion is what its prompt alone would give."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY_MODELS, VOCAB, tiny_model

from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.sampling import _drawn, generate

PROMPTS = [[5, 6, 7]] * 3 + [[8, 9, 10, 11, 12]] + [[5, 6, 7]] + [[13]] * 2
LENGTH = 9


def alone(model, prompt: list[int], ends: list[int]) -> list[int]:
    """The greedy completion by transformers' own loop."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, eos_token_id=ends,
        pad_token_id=0,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", sorted(TINY_MODELS))
def test_a_batch_gives_what_each_prompt_gives_alone(family):
    """Prompts of several lengths, some of them several times; rows that end at different tokens."""
    model, arguments = tiny_model(family), TrainArguments(max_completion_length=LENGTH)
    first, second = (alone(model, PROMPTS[i], [VOCAB]) for i in (0, 3))
    ends = [first[3], second[5]]
    shapes: list[tuple[int, ...]] = []
    seen = model.get_input_embeddings().register_forward_hook(lambda *call: shapes.append(tuple(call[1][0].shape)))
    found = generate(model, PROMPTS, arguments, ends=ends, pad_id=0, greedy=True)
    seen.remove()
    assert shapes[0] == (4, 5) and all(columns == 1 for _, columns in shapes[1:])
    for prompt, s in zip(PROMPTS, found, strict=True):
        assert s.ids == alone(model, prompt, ends) and s.ended == (s.ids[-1] in ends)
        assert s.logps.shape == (len(s.ids),) and s.kept is None


def test_rows_that_have_ended_leave_the_batch():
    model, arguments = tiny_model("llama"), TrainArguments(max_completion_length=32)
    rows: list[int] = []
    seen = model.get_input_embeddings().register_forward_hook(lambda *call: rows.append(len(call[1][0])))
    torch.manual_seed(0)
    found = generate(model, [[5, 6, 7]] * 64, arguments, ends=list(range(3, 9)), pad_id=0)
    seen.remove()
    lengths = [len(s.ids) for s in found]
    assert rows[:2] == [1, 64] and rows[-1] < 16 and len(rows) == max(lengths)
    for calls, size in enumerate(rows[1:], start=1):  # a call of the model gives each row its token calls + 1
        going = sum(length > calls for length in lengths)
        assert going <= size and (size == 64 or going > 0)
    assert all(s.ended for s in found if len(s.ids) < 32)


def test_draws_have_the_probabilities_that_they_are_told():
    torch.manual_seed(0)
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    drawn = _drawn(probabilities.expand(40_000, -1)).squeeze(1)
    shares = torch.bincount(drawn, minlength=7) / len(drawn)
    assert (shares[probabilities == 0] == 0).all()
    deviation = (probabilities * (1 - probabilities) / len(drawn)).sqrt()
    assert ((shares - probabilities).abs() <= 4 * deviation).all()
    assert (_drawn(torch.eye(5)) == torch.arange(5)[:, None]).all()
