"""What kernels over a few ids per token must do, against float64: rows of ids from a mask, three products over them."""

from __future__ import annotations

import math
import random

import torch
from kernel_checks import UNIT, Kernels, placed
from torch import Tensor

from grpo_kernels.kernels.operations import AllowedIdRows, GatheredIds, Rows, TokenIdPairs, TokenMask

# Columns beyond a vector, a tile of Triton's (128, 512), and a block of CUDA's (1,024 in float32, 2,048 in 16 bits).
GATHERED_WIDTHS = (1, 7, 131, 515, 1031, 2053)
GATHERED_COUNTS = (0, 1, 3, 4, 5, 15, 16, 17, 31, 32)  # ids of a row: groups of 4, tiles of 16, with and without a rest


def make_gathered(tokens: int, vocab: int, seed: int = 0) -> GatheredIds:
    """Rows of tokens in no order. Most keep id 0 and the last id, none id 7."""
    rng = random.Random(seed)
    others = [i for i in range(1, vocab - 1) if i != 7]
    rows = [[0, *sorted(rng.sample(others, n - 2)), vocab - 1] if n > 1 else [0] * n for n in GATHERED_COUNTS * 2]
    ids = torch.tensor([row + [-1] * (max(GATHERED_COUNTS) - len(row)) for row in rows], dtype=torch.int32)
    return GatheredIds(Rows(0, len(rows), torch.tensor(rng.sample(range(tokens), len(rows)))), ids)


def check_allowed_ids(kernels: Kernels, dtype: torch.dtype) -> None:
    """The rows of ids of a whole vocabulary, and of slices of it, from a mask with ids that no vocabulary has."""
    tokens, vocab = 23, 300
    rng = random.Random(0)
    rows = [sorted(rng.sample(range(vocab), n)) for n in (0, 1, 2, 63, 64, 65, 127, 128, *[9] * 15)]
    sampled = [rng.choice(row) if row and t % 3 else rng.randrange(vocab) for t, row in enumerate(rows)]
    rows[9][-1], rows[10][0], rows[11][-1], sampled[12], sampled[13] = vocab, -1, 2**31 - 1, vocab, -1
    counts = torch.tensor([len(row) for row in rows])
    mask = TokenMask(torch.tensor([i for row in rows for i in row], dtype=dtype), counts, counts.cumsum(0))
    index = rng.sample(range(1, tokens), tokens - 1)
    for local_vocab in (range(vocab), range(100), range(100, 220), range(220, vocab)):
        ids = torch.full((len(index), 132), 7, dtype=torch.int32)
        token_of, columns = ids.clone(), torch.full((tokens,), 7)
        found = AllowedIdRows(
            GatheredIds(Rows(0, len(index), torch.tensor(index)), ids), token_of, columns, torch.ones(22) > 2
        )
        kernels.allowed_ids(mask, torch.tensor(sampled), local_vocab, vocab, found)
        assert columns[0] == 7 and (token_of == torch.tensor(index)[:, None]).all()
        for i, token in enumerate(index):
            row, column, added = ids[i].tolist(), int(columns[token]), bool(found.added[i])
            assert added == (sampled[token] not in rows[token])
            if token in (9, 10, 11, 12, 13):
                assert column == -1 and all(-1 <= x < len(local_vocab) for x in row)
                continue
            local_ids = [x for x in rows[token] if x in local_vocab]
            local_ids += [sampled[token]] if added and sampled[token] in local_vocab else []
            assert row == [x - local_vocab.start for x in local_ids] + [-1] * (132 - len(local_ids))
            assert column == (local_ids.index(sampled[token]) if sampled[token] in local_vocab else -1)


def check_gathered(kernels: Kernels, width: int, dtype: torch.dtype, *, wide: bool, shift: int = 0) -> None:
    """The three products, gradients in float32 (`wide`) or in `dtype`; each twice, to the same bits."""
    tokens, vocab, out = 23, 37, torch.float32 if wide else dtype
    g = torch.Generator().manual_seed(width)

    def matrix(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return placed(torch.randn(rows, width, generator=g), width + 3, shift, dtype)

    hidden, weight, bias = matrix(tokens, dtype)[0], matrix(vocab, dtype)[0], torch.randn(vocab, generator=g)
    gathered = make_gathered(tokens, vocab, seed=width)
    (count, slots), index, used = gathered.ids.shape, gathered.rows.index, gathered.ids >= 0
    rows = gathered.ids.clamp(min=0).long()
    h, w = hidden.double()[index], weight.double()[rows]

    for given in (bias, None):
        found = torch.full((2, count, slots), 7.5)
        for logits in found:
            kernels.gathered_logits(hidden, weight, given, gathered, logits)
        expected = torch.einsum("ch,ckh->ck", h, w) + (0.0 if given is None else given.double()[rows])
        check_product(found, expected.masked_fill(~used, -math.inf), width)

    factors = torch.randn(count, slots, generator=g)
    dlogits = torch.where(used, factors, math.nan)  # what unused places hold is not read
    factors = torch.where(used, factors, 0.0).double()
    pairs = TokenIdPairs(gathered.ids.view(-1), index.to(torch.int32).repeat_interleave(slots))
    shares = (factors[..., None] * h[:, None]).view(-1, width)
    for kind in ("dhidden", "dweight", "dweight, added"):
        found, buffers = zip(*[matrix(tokens if kind == "dhidden" else vocab, out) for _ in range(2)], strict=True)
        found[1].copy_(found[0])
        before = found[0].clone(), buffers[0].clone()
        expected = before[0].double()
        if kind == "dhidden":
            expected[index] = torch.einsum("ck,ckh->ch", factors, w)
        else:
            expected = (expected if "added" in kind else 0 * expected).index_add(0, rows.view(-1), shares)
        for x in found:
            if kind == "dhidden":
                kernels.gathered_dhidden(dlogits, weight, gathered, x)
            else:
                kernels.gathered_dweight(dlogits.view(-1), hidden, pairs, x, add="added" in kind)
        check_product(torch.stack(found), expected, count)
        found[0].copy_(before[0])
        assert torch.equal(buffers[0], before[1])  # what lies around and between the rows


def check_product(found: Tensor, expected: Tensor, terms: int) -> None:
    """(2, ...) of equal bits, within the rounding of their type plus float32 sums of so many terms of about 1."""
    assert torch.equal(found[0], found[1])
    absent = expected == -math.inf
    assert torch.equal(found[0] == -math.inf, absent)
    bound = expected.abs() * UNIT[found.dtype] * 1.01 + 4e-6 * terms**0.5
    assert ((found[0].double() - expected).abs() <= bound)[~absent].all()
