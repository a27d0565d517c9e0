"""What kernels of rows and tokens must do, against float64. Each check raises AssertionError.

`kernels` is a backend; emulator.Emulated runs the CUDA kernels on an emulated GPU, on the device and in the order of
threads that have been chosen there. tests/test_cuda_faults.py runs the checks on kernels with planted faults.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_kernels import reference
from grpo_kernels.contract import (
    KeptIds,
    KeptPairs,
    KeptRows,
    LogitChunk,
    PlannedTokens,
    RowGradients,
    Rows,
    RowStats,
    TokenInputs,
    TokenMask,
    TokenValues,
    no_values,
)  # fmt: skip
from grpo_kernels.kernels.torch import coefficients
from grpo_kernels.kernels.torch.plan import plan_tokens
from grpo_kernels.kernels.torch.sums import column_sums
from grpo_kernels.names import (
    AGGREGATIONS,
    FIELD,
    KL_ESTIMATORS,
    LEVELS,
    OUTSIDE,
    SURROGATES,
    TABLE_FIELDS,
    VALUE_FIELDS,
    KernelParams,
    PlanRules,
    shares_ratio,
)

Kernels = Any
VOCABS = (1, 2, 15, 16, 63, 64, 65, 1000, 2047, 2048, 2049, 5003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
PAIRS = [(t, t) for t in DTYPES] + [(torch.float32, t) for t in DTYPES[1:]]  # logits, gradient
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a last place
SIGNALLING = {torch.float32: 0x7F800001, torch.bfloat16: 0x7F81, torch.float16: 0x7C01}  # a NaN of each type, as bits


def some_values(tokens: int, dtype: torch.dtype = torch.float32) -> TokenValues:
    """What a kernel must write over or leave alone."""
    columns = torch.full((len(VALUE_FIELDS), tokens), 7.5, dtype=dtype)
    return TokenValues(columns, torch.full((tokens,), 7.5, dtype=torch.float64))


def make_table(rows: int, seed: int = 0, **fields: float | Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(len(TABLE_FIELDS), rows)
    for name in ("multiplier", "weight_ratio", "weight_direct", "temperature", "rollout_weight"):
        table[FIELD[name]] = 1.0
    table[FIELD["advantage"]] = torch.randn(rows, generator=generator)
    table[FIELD["entropy_threshold"]] = -math.inf
    table[FIELD["rollout"]] = math.nan
    for name, value in fields.items():
        table[FIELD[name]] = value
    return table


def make_logits(rows: int, vocab: int, dtype: torch.dtype, spread: float = 4.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    return logits, torch.randint(vocab, (rows,), generator=generator)


def placed(values: Tensor, row_stride: int, shift: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(a copy of `values` with this row stride, `shift` elements after a 64-byte boundary; the buffer around it)."""
    dtype = dtype or values.dtype
    rows, columns = values.shape
    buffer = torch.full((rows * row_stride + shift + 64,), 7.5, dtype=dtype)
    skip = -buffer.data_ptr() % 64 // buffer.element_size() + shift
    view = buffer[skip : skip + rows * row_stride].view(rows, row_stride)[:, :columns]
    view.copy_(values)
    return view, buffer


def exact(
    logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """(u, logp, lse, entropy) in float64, differentiable in u = logits + bias, which is rounded to float32."""
    u = (logits if bias is None else logits.float() + bias).double().requires_grad_()
    z = params.logit_scale * u
    if params.softcap:
        z = params.softcap * torch.tanh(z / params.softcap)
    z = z / temperature.double()[:, None]
    lse = z.logsumexp(-1)
    log_p = z - lse[:, None]
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return u, log_p.gather(1, ids[:, None])[:, 0], lse, entropy


def check_gradient(grad: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Within the rounding of the gradient's type, plus an fp32 error of the row's own size."""
    bound = expected.abs() * (UNIT[grad.dtype] * 1.01 + 1e-5) + scale.double().abs()[:, None] * 1e-6
    if grad.dtype == torch.float16:
        bound = bound + 2.0**-25
    assert ((grad.double() - expected).abs() <= bound).all()


def check_statistics(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), truth.detach().double(), rtol=5e-7, atol=2e-6)


def check_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=0, equal_nan=True)


# --- rows -----------------------------------------------------------------------------------------------------------
# Of a batch whose tokens are the rows, in order.


def chunk_of(logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> LogitChunk:
    return LogitChunk(logits, Rows(0, len(ids)), ids, temperature, some_values(len(ids), temperature.dtype), params)


def statistics(kernels: Kernels, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
    chunk = chunk_of(logits, ids, temperature, params)
    kernels.statistics(chunk)
    return stats_of(chunk.values)


def gradient(
    kernels: Kernels, logits: Tensor, grad: Tensor, ids: Tensor, temperature: Tensor, stats: RowStats, g_logp: Tensor,
    g_entropy: Tensor, params: KernelParams, rounding_error: Tensor | None = None
) -> None:  # fmt: skip
    chunk = chunk_of(logits, ids, temperature, params)
    chunk.values.entropy.copy_(stats.entropy)
    chunk.values.lse.copy_(stats.lse)
    kernels.logits_gradient(chunk, g_logp, g_entropy, RowGradients(grad, rounding_error))


def single_pass(
    kernels: Kernels, logits: Tensor, grad: Tensor | None, ids: Tensor, table: Tensor, params: KernelParams
) -> RowStats:
    """Statistics; d loss / d logits goes to `grad`."""
    chunk = chunk_of(logits, ids, table[FIELD["temperature"]], params)
    kernels.single_pass(chunk, table, None if grad is None else RowGradients(grad))
    return stats_of(chunk.values)


def stats_of(values: TokenValues, rows: Rows | None = None) -> RowStats:
    found = (values.logp, values.lse, values.entropy)
    return RowStats(*(x.clone() if rows is None else rows.take(x).clone() for x in found))


def spread(rows: Rows, tokens: int, x: Tensor, elsewhere: float = math.nan) -> Tensor:
    """Per row -> per token, with something at all other tokens that must not be looked at."""
    out = torch.full((*x.shape[:-1], tokens), elsewhere, dtype=x.dtype)
    rows.put(out, x, dim=x.dim() - 1)
    return out


def check_values(kernels: Kernels, rows: Rows, values: TokenValues, table: Tensor | None, params: KernelParams) -> None:
    """Exactly these rows' tokens have been written: their statistics, and with a table the objective at these, of which
    the same formula compiled twice may differ by roundings."""
    expected = some_values(values.columns.shape[1])
    for name in ("logp", "entropy"):
        field = VALUE_FIELDS.index(name)
        rows.put(expected.columns[field], rows.take(values.columns[field]))
    rows.put(expected.lse, rows.take(values.lse))
    if table is not None:
        kernels.token_objective(rows, table, expected, params)
    torch.testing.assert_close(values.columns, expected.columns, rtol=1e-5, atol=1e-6)
    assert torch.equal(values.lse, expected.lse)


def check_rows(
    kernels: Kernels,
    vocab: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    params: KernelParams,
    shift: int = 0,
    biased: bool = False,
) -> None:
    """statistics, logits_gradient and single_pass of a few rows, all at a row stride of their own, each called twice:
    for neighbours among the tokens, and for a list of tokens."""
    count, tokens = 5, 11
    values, ids = make_logits(count, vocab, dtypes[0])
    logits, _ = placed(values, vocab + 3, shift)
    bias = torch.randn(shift % 5 + vocab)[shift % 5 :] if biased else None
    temperature = torch.tensor([1.0, 0.7, 1.0, 1.3, 2.0])
    # The third row has a zero gradient.
    g_logp, g_entropy = torch.tensor([1.0, -0.3, 0.0, 0.0, 2.0]), torch.tensor([0.0, 0.5, 0.0, -1.0, 0.1])
    u, logp, lse, entropy = exact(values, ids, temperature, params, bias)
    expected = torch.autograd.grad((g_logp * logp + g_entropy * entropy).sum(), u)[0]
    scale = (g_logp.abs() + g_entropy.abs() * 8) * params.logit_scale / temperature
    own = make_table(count, temperature=temperature, advantage=-g_logp, weight_entropy=g_entropy)
    reinforce = params._replace(surrogate="weighted", has_old=False)

    results = []
    for rows in (Rows(3, 8), Rows(0, count, torch.tensor([7, 2, 9, 0, 4]))):
        table = spread(rows, tokens, own)
        per_token = (temperature, g_logp, g_entropy)
        t_temperature, t_logp, t_entropy = (spread(rows, tokens, x) for x in per_token)
        t_ids = spread(rows, tokens, ids, 10**15)

        by_stats = some_values(tokens)
        chunk = LogitChunk(logits, rows, t_ids, t_temperature, by_stats, params, bias)
        kernels.statistics(chunk)
        check_statistics(stats_of(by_stats, rows), (logp, lse, entropy))
        check_values(kernels, rows, by_stats, None, params)
        if biased and dtypes[0] == torch.float32:  # the bits of logits that hold the bias
            added = some_values(tokens)
            kernels.statistics(
                chunk._replace(logits=placed(values + bias, vocab + 3, shift)[0], bias=None, values=added)
            )
            check_equal(stats_of(added), stats_of(by_stats))

        by_gradient, around = placed(torch.zeros(count, vocab), vocab + 5, shift + 1, dtypes[1])
        errors = torch.full((2, count), math.nan)
        written = RowGradients(by_gradient, errors[0])
        kernels.logits_gradient(chunk, t_logp, t_entropy, written)
        check_gradient(by_gradient, expected, scale)

        passed, chunk = some_values(tokens), chunk._replace(temperature=table[FIELD["temperature"]], params=reinforce)
        by_pass, around_pass = placed(torch.zeros(count, vocab), vocab + 5, shift + 1, dtypes[1])
        kernels.single_pass(chunk._replace(values=passed), table, RowGradients(by_pass, errors[1]))
        check_statistics(stats_of(passed, rows), (logp, lse, entropy))
        check_values(kernels, rows, passed, table, reinforce)
        check_gradient(by_pass, expected, scale)
        sampled = torch.arange(count), ids
        for grad, error in zip((by_gradient, by_pass), errors, strict=True):
            torch.testing.assert_close(grad[sampled].double() + error, expected[sampled], rtol=5e-6, atol=1e-6)

        without = some_values(tokens)
        kernels.single_pass(chunk._replace(values=without), table)
        check_equal(stats_of(without), stats_of(by_stats))
        check_values(kernels, rows, without, table, reinforce)

        gradients = by_gradient.clone(), by_pass.clone()
        for grad, buffer in ((by_gradient, around), (by_pass, around_pass)):
            assert not grad[2].any()
            grad.fill_(7.5)  # nothing else in the buffer has been touched
            assert (buffer == 7.5).all()
        results.append((*stats_of(by_stats, rows), rows.take(passed.columns, 1), *gradients, errors))
    assert torch.equal(logits, values)
    check_equal(results[1], results[0])


def check_in_place(kernels: Kernels, vocab: int, dtypes: tuple[torch.dtype, torch.dtype], shift: int = 0) -> None:
    """Over the logits of the same type, or 16-bit over the front of the fp32 rows that they come from: the bits of a
    gradient elsewhere."""
    rows = 4
    values, ids = make_logits(rows, vocab, dtypes[0])
    table, params = make_table(rows, advantage=-1.0), KernelParams(surrogate="weighted", has_old=False)
    table[FIELD["weight_entropy"], 1] = 0.2
    ones = torch.ones(rows)
    # At the same places between two multiples of 16 bytes: the order of a sum depends on them.
    untouched, _ = placed(values, vocab + 3, shift)
    stats = statistics(kernels, untouched, ids, ones, params)

    def by_pass(logits: Tensor, grad: Tensor) -> None:
        check_equal(single_pass(kernels, logits, grad, ids, table, params), stats)

    def by_gradient(logits: Tensor, grad: Tensor) -> None:
        gradient(kernels, logits, grad, ids, ones, stats, ones, table[FIELD["weight_entropy"]], params)

    for write in (by_pass, by_gradient):
        logits, buffer = placed(values, vocab + 3, shift)
        over, apart = logits, torch.empty(rows, vocab, dtype=dtypes[1])
        if dtypes[1] != dtypes[0]:
            # Logits start at a multiple of 4 bytes, so a view in 16 bits exists; its row stride is twice as long.
            start = logits.storage_offset() * 2
            over = buffer.view(dtypes[1])[start:].as_strided((rows, vocab), (2 * (vocab + 3), 1))
        assert over.data_ptr() == logits.data_ptr()
        write(untouched, apart)
        write(logits, over)
        assert torch.equal(over, apart)
        width = vocab * dtypes[1].itemsize // dtypes[0].itemsize + 1  # of the logits' elements, the last one in part
        logits[:, :width] = 7.5
        if dtypes[1] == dtypes[0]:
            assert (buffer == 7.5).all()


def check_extremes(kernels: Kernels, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    vocab = 3000
    logits = torch.zeros(10, vocab, dtype=dtypes[0])
    logits[0] = -1e4 + torch.arange(vocab) % 7  # a maximum far below zero
    logits[1, ::2] = -math.inf  # a masked vocabulary, the sampled id inside
    logits[2, :2500] = -math.inf  # whole blocks of it
    logits[3, 17] = 200.0  # one certain token, sampled
    logits[4, 17] = 200.0  # and not sampled
    logits[5] = torch.linspace(-6e4, 6e4, vocab).to(dtypes[0])
    logits[6, -1] = 95.0
    logits[7, 1:] = -math.inf
    logits[8, 5] = 95.0  # the sampled id has p = e^-95
    logits[9, 11] = 25.0  # sampled, p = 1 - 4e-8
    ids = torch.tensor([3, 1, 2999, 17, 18, 0, vocab - 1, 0, 6, 11])
    rows, ones = torch.arange(10), torch.ones(10)
    params = KernelParams(surrogate="weighted", has_old=False)
    _, logp, lse, entropy = (x.detach() for x in exact(logits, ids, ones, params))
    found = statistics(kernels, logits, ids, ones, params)
    check_statistics(found, (logp, lse, entropy))
    p = torch.softmax(logits.double(), -1)
    log_p = torch.where(p > 0, logits.double() - lse[:, None], 0.0)
    by_gradient, by_pass = torch.empty(2, 10, vocab, dtype=dtypes[1])
    for weight in (0.1, 0.0):  # of the entropy
        expected = -p * (1 + weight * (log_p + entropy[:, None]))
        expected[rows, ids] += 1
        gradient(kernels, logits, by_gradient, ids, ones, found, ones, weight * ones, params)
        single_pass(kernels, logits, by_pass, ids, make_table(10, advantage=-1.0, weight_entropy=weight), params)
        for grad in (by_gradient, by_pass):
            check_gradient(grad, expected, ones * 2)
            assert (grad[torch.isneginf(logits)] == 0).all()


def check_absent_and_zero_gradient(kernels: Kernels, dtypes: tuple[torch.dtype, torch.dtype] = PAIRS[0]) -> None:
    vocab = 1100
    logits, _ = make_logits(4, vocab, dtypes[0])
    logits[0, 5] = -math.inf
    grad, ids = torch.empty(4, vocab, dtype=dtypes[1]), torch.tensor([5, -1, vocab, 2**40 + 7])
    table = make_table(4, weight_direct=0.0, weight_ratio=0.0)
    logp, lse, _ = single_pass(kernels, logits, grad, ids, table, KernelParams())
    assert logp[0] == -math.inf
    assert logp[1:].isnan().all()
    assert lse.isfinite().all()
    assert not grad.any()
    # A zero-gradient row is not read by `gradient`, and a NaN in it does not come through.
    logits[:, ::7] = math.nan
    grad.fill_(math.nan)
    zeros, rounding_error = torch.zeros(4), torch.full((4,), math.nan)
    stats = RowStats(zeros, lse, zeros)
    gradient(kernels, logits, grad, ids, zeros + 1, stats, zeros, zeros, KernelParams(), rounding_error)
    assert not grad.any()
    assert not rounding_error.any()
    # A row with no id at all, as of a slice of the vocabulary that holds none of those kept, under the others' lse.
    logits, ids = torch.full_like(logits, -math.inf), torch.full_like(ids, -1)
    others = RowStats(zeros, zeros.double() + 2, zeros)
    for params in (KernelParams(), KernelParams(softcap=3.0)):
        assert (statistics(kernels, logits, ids, zeros + 1, params).lse == -math.inf).all()
        grad.fill_(math.nan)
        gradient(kernels, logits, grad, ids, zeros + 1, others, zeros + 1, zeros + 0.1, params, rounding_error)
        assert not grad.any()
        assert not rounding_error.any()
    for place in (0, 600, vocab - 1):
        logits, grad = torch.zeros(1, vocab, dtype=dtypes[0]), torch.zeros(1, vocab, dtype=dtypes[1])
        logits[0, place] = math.nan
        ids = torch.zeros(1, dtype=torch.int64)
        for found in (
            statistics(kernels, logits, ids, torch.ones(1), KernelParams()),
            single_pass(kernels, logits, grad, ids, make_table(1), KernelParams()),
        ):
            assert all(value.isnan().all() for value in found)


def check_accuracy(kernels: Kernels) -> None:
    """logp is at least as accurate as torch's."""
    ones, params = torch.ones(64), KernelParams()
    for spread in (1.0, 5.0, 30.0):
        logits, ids = make_logits(64, 32003, torch.float32, spread)
        truth = exact(logits, ids, ones, params)[1].detach()
        limit = (torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0] - truth).abs().max()
        by_pass = single_pass(kernels, logits, torch.empty_like(logits), ids, make_table(64), params)
        for found in (statistics(kernels, logits, ids, ones, params), by_pass):
            assert (found.logp - truth).abs().max() <= limit


def check_sixteen_bits(kernels: Kernels, dtype: torch.dtype, every: int = 1) -> None:
    """16-bit patterns are read exactly; gradients round to nearest even as torch does."""
    patterns = torch.arange(-(2**15), 2**15, every, dtype=torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()]
    rows = patterns[:, None].contiguous()  # V = 1: lse = z
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    lse = statistics(kernels, rows, zeros, torch.ones(len(rows)), KernelParams()).lse
    assert torch.equal(lse, patterns.double())

    wide = torch.cat(
        [patterns.float() * 1.00195, torch.logspace(-9, 5.2, 5000 // every), torch.tensor([math.nan, 1e9])]
    )
    logits, ids = torch.zeros(len(wide), 2), torch.zeros(len(wide), dtype=torch.int64)
    half, full = torch.empty(len(wide), 2, dtype=dtype), torch.empty(len(wide), 2)
    ones = torch.ones(len(wide))
    stats = statistics(kernels, logits, ids, ones, KernelParams())
    for grad in (half, full):
        gradient(kernels, logits, grad, ids, ones, stats, wide, 0 * ones, KernelParams())
    torch.testing.assert_close(half, full.to(dtype), rtol=0, atol=0, equal_nan=True)


# --- the objective --------------------------------------------------------------------------------------------------


def expected_objective(log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, p: KernelParams) -> Tensor:
    """(4, N) float64: the same by autograd over the reference's formulas, log ratio and logp being separate leaves. A
    ratio that is the token's own and corrects the KL moves with logp."""
    p = p._replace(**{name: float(np.float32(x)) for name, x in p._asdict().items() if isinstance(x, float)})
    bounds = [None if x == math.inf else x for x in (p.kl_delta_clamp, p.kl_clamp)]
    named, surrogate = p._asdict(), p.surrogate
    named["ratio_cap"] = None if p.ratio_cap == math.inf else p.ratio_cap
    if surrogate == "weighted":
        surrogate = {"clamp": "cispo_two_sided", "drop": "cispo_mask", "drop_outward": "cispo_unified"}[p.outside]
        named |= {"epsilon_low": 1 - p.weight_low, "epsilon_high": p.weight_high - 1}
    config: Any = SimpleNamespace(**named, kl_estimator=p.kl, kl_clamps=bounds)
    field = {name: table[i].double() for name, i in FIELD.items()}
    x, logp = (t.double().requires_grad_() for t in (log_ratio, logp))
    r = x.clamp(-p.log_ratio_clamp, min(p.log_ratio_clamp, reference.EXPONENT_LIMIT)).exp()
    value = field["multiplier"] * reference.SURROGATES[surrogate](config, r, x, logp, field["advantage"])
    value = torch.where((field["multiplier"] == 0) | (entropy < field["entropy_threshold"]), 0.0, value)
    kl = torch.zeros_like(value) if p.kl == "none" else reference.kl_estimate(config, logp, field["ref"])
    if p.score_term:
        kl = reference.score_term(config, kl, logp, field["ref"])
    if p.bias_correction:
        if not shares_ratio(p.level):
            own = x.detach() + logp - logp.detach()
            r = own.clamp(-p.log_ratio_clamp, min(p.log_ratio_clamp, reference.EXPONENT_LIMIT)).exp()
        kl = (kl * r).clamp(-reference.PRODUCT_LIMIT, reference.PRODUCT_LIMIT)
    value = value + p.beta * kl
    slopes = torch.autograd.grad(value.sum(), (x, logp), allow_unused=True, materialize_grads=True)
    return torch.stack([value, *slopes, kl]).detach()


def objective(
    kernels: Kernels, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(value, d_ratio, d_direct, kl), (N,) each, at these log ratios up to a rounding of logp - log_ratio."""
    table, params = table.clone(), params._replace(has_old=True)
    table[FIELD["old"]] = logp - log_ratio
    found = []
    for ratio, direct in ((1.0, 0.0), (0.0, 1.0)):  # one derivative at a time: g_logp is their weighted sum
        table[FIELD["weight_ratio"]], table[FIELD["weight_direct"]] = ratio, direct
        values = no_values(len(logp), table.dtype, table.device)
        values.logp.copy_(logp)
        values.entropy.copy_(entropy)
        kernels.token_objective(Rows(0, len(logp)), table, values, params)
        found.append(values)
    value, kl = found[0].columns[3:5]
    return value, found[0].g_logp, found[1].g_logp, kl


def check_objective(
    kernels: Kernels, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
) -> None:
    found = torch.stack(objective(kernels, log_ratio, logp, entropy, table, params))
    assert found.isfinite().all()
    expected = expected_objective(log_ratio, logp, entropy, table, params)
    torch.testing.assert_close(found.double(), expected, rtol=3e-5, atol=3e-6)


# --- plan, objective of sequences, sums -----------------------------------------------------------------------------
# Random configurations and batches; plain torch says what is right.


class Draw:
    """Choices and numbers of one case."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def one_of(self, *options: object) -> object:
        return self.choices.choice(options)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def chance(self, shape: tuple[int, ...], probability: float = 0.7) -> Tensor:
        return torch.rand(shape, generator=self.generator) < probability


Lengths = tuple[int, int] | list[int] | None


def make_inputs(draw: Draw, lengths: Lengths = None) -> tuple[TokenInputs, Tensor]:
    """(inputs, ids) of a batch (B, T), or packed sequences of these lengths; of any, and empty ones among them, without
    `lengths`."""
    if lengths is None:
        lengths = [draw.choices.choice((0, 1, 3, 7, 20)) for _ in range(draw.choices.randint(1, 12))]
        if draw.one_of(True, False):
            lengths = len(lengths), draw.choices.randint(1, 23)
    if isinstance(lengths, tuple):
        shape, cu_seqlens = lengths, None
    else:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        shape, cu_seqlens = (int(offsets[-1]),), offsets.to(draw.one_of(torch.int32, torch.int64))
    sequences = shape[0] if cu_seqlens is None else len(lengths)
    advantages = draw.normal(*draw.one_of((sequences,), (sequences, 1), shape))
    advantages[draw.chance(advantages.shape, 0.4)] = 0.0
    rollout = -draw.normal(*shape).abs()
    rollout[draw.chance(shape, 0.2)] = math.nan
    weights = draw.normal(*draw.one_of((sequences,), shape)).abs()
    weights[draw.chance(weights.shape, 0.3)] = 0.0
    mask = draw.chance(shape).to(draw.one_of(*MASKS))
    if mask.dtype.itemsize == 8:
        mask = mask * 2**40  # the low half alone is zero
    optional = {
        "completion_mask": mask,
        "old_logps": -draw.normal(*shape).abs(),
        "ref_logps": -draw.normal(*shape).abs(),
        "rollout_weights": weights,
        "rollout_logps": rollout,
        "normalizer": draw.one_of(torch.tensor(7.5), torch.tensor(12)),
        "temperature": draw.one_of(draw.normal(*shape).exp(), torch.tensor(0.7)),
        "entropy_threshold": torch.tensor(0.3),
    }
    given = {name: x for name, x in optional.items() if draw.one_of(True, False)}
    for name in ("old_logps", "ref_logps", "temperature"):  # whatever padding holds
        if "completion_mask" in given and given.get(name, torch.tensor(0.0)).shape == shape:
            given[name][mask == 0] = math.nan
    ids = torch.randint(0, 1000, shape, generator=draw.generator)
    return TokenInputs(advantages.to(draw.one_of(torch.float32, torch.bfloat16)), cu_seqlens=cu_seqlens, **given), ids


def make_rules(draw: Draw) -> PlanRules:
    def flag() -> bool:
        return bool(draw.one_of(True, False))

    return PlanRules(
        aggregation=draw.one_of(*AGGREGATIONS),
        level=draw.one_of(*LEVELS),
        divides_by_rollout=flag(),
        multiplies_rollout_weight=flag(),
        whole_sequences=flag(),
        needs_advantage=flag(),
        kl_has_gradient=draw.choices.random() < 0.2,
        score_inactive=flag(),
        max_completion_length=float(draw.choices.randint(1, 40)),
        entropy_coef=draw.one_of(0.0, 0.0, 0.01, -0.02),
        temperature=draw.one_of(1.0, 1.3),
        entropy_threshold=draw.one_of(-math.inf, 0.5),
    )


def check_plan(kernels: Kernels, inputs: TokenInputs, ids: Tensor, rules: PlanRules) -> None:
    """Against the plan in plain torch: to the bit, but for weights, which are sums or products of a few roundings.
    Twice, and without the order."""
    found, again = (kernels.plan(inputs, ids, rules, torch.float32, ordered=True) for _ in range(2))
    static = kernels.plan(inputs, ids, rules, torch.float32, ordered=False)
    expected = plan_tokens(inputs, ids, rules, torch.float32, ordered=True)
    for name, i in FIELD.items():
        rtol = 1e-5 if name in ("weight_ratio", "weight_direct", "weight_entropy") else 0
        torch.testing.assert_close(found.table[i], expected.table[i], rtol=rtol, atol=0, equal_nan=True, msg=name)
    for name in ("offsets", "lengths", "scored", "active", "ids", "counts"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0, msg=name)
    assert found.values.lse.dtype == torch.float64
    assert all(x.shape == y.shape and not x.any() for x, y in zip(found.values, expected.values, strict=True))
    written = int(found.counts[:2].sum())
    assert torch.equal(found.order[:written], expected.order[:written])
    assert static.order is None and static.counts is None
    for other in (again, static):
        check_equal([other.table, *other.values, *other[2:7]], [found.table, *found.values, *found[2:7]])
    check_equal([again.order[:written], again.counts], [found.order[:written], found.counts])


def make_params(draw: Draw, inputs: TokenInputs, surrogate: str, level: str) -> KernelParams:
    has_rollout = inputs.rollout_logps is not None
    divides_by_rollout = surrogate in ("dppo_tv", "dppo_kl", "ipo")
    kl = draw.one_of(*KL_ESTIMATORS) if inputs.ref_logps is not None else "none"
    return KernelParams(
        surrogate=surrogate,
        kl=kl,
        has_old=inputs.old_logps is not None or (has_rollout and divides_by_rollout),
        bias_correction=kl != "none" and bool(draw.one_of(True, False)),
        score_term=kl in ("k1", "k2", "k3", "abs") and bool(draw.one_of(True, False)),
        outside=draw.one_of(*OUTSIDE),
        weight_low=draw.one_of(1.0, 0.8),
        weight_high=draw.one_of(1.0, 1.3),
        dppo_kl_tau=draw.one_of(0.0, 0.1),
        ratio_cap=draw.one_of(math.inf, 1.2),
        beta=draw.one_of(0.0, 0.1),
        epsilon_high=draw.one_of(0.2, 2.0),
        delta=draw.one_of(math.inf, 1.5),
        dual_clip=draw.one_of(math.inf, 3.0),
        log_ratio_clamp=draw.one_of(math.inf, 1.0),
        level=level,
        has_rollout=has_rollout,
        vespo=surrogate == "weighted" and bool(draw.one_of(True, False)),
        divides_by_rollout=divides_by_rollout,
        off_policy_threshold=draw.one_of(math.inf, 0.1),
    )


def scored_batch(draw: Draw, case: int, lengths: Lengths = None) -> tuple[PlannedTokens, KernelParams]:
    """A planned batch whose tokens have log-probabilities; those that are not scored have none."""
    inputs, ids = make_inputs(draw, lengths)
    inputs = inputs._replace(advantages=inputs.advantages.float())
    surrogate, level = SURROGATES[case % len(SURROGATES)], LEVELS[case % len(LEVELS)]
    if surrogate == "gmpo" and inputs.old_logps is None:  # its clamp acts on log ratios
        inputs = inputs._replace(old_logps=-draw.normal(*ids.shape).abs())
    params = make_params(draw, inputs, surrogate, level)
    rules = make_rules(draw)._replace(level=params.level, divides_by_rollout=params.divides_by_rollout)
    plan = plan_tokens(inputs, ids, rules, torch.float32, ordered=False)
    logp, entropy = -draw.normal(ids.numel()).abs(), draw.normal(ids.numel()).abs()
    plan.values.columns[0], plan.values.columns[1] = (torch.where(plan.scored, x, 0.0) for x in (logp, entropy))
    return plan, params


def exactly(plan: PlannedTokens) -> PlannedTokens:
    """A copy in float64."""
    return plan._replace(table=plan.table.double(), values=TokenValues(*(x.double() for x in plan.values)))


def check_sequences(kernels: Kernels, case: int, lengths: Lengths = None) -> None:
    """sequence_objective of all sequences, and of some, with the same bits: tokens that are not scored, or of others,
    keep what they hold."""
    draw = Draw(100 + case)
    plan, params = scored_batch(draw, case, lengths)
    plan.table[:, ~plan.scored] = math.nan  # never read
    plan.values.columns[:, ~plan.scored] = 7.0
    sequences, exact = plan.lengths.numel(), exactly(plan)
    coefficients.sequence_objective(
        exact.table, plan.scored, plan.offsets, exact.lengths.double(), exact.values, params
    )
    whole, part = (plan._replace(values=TokenValues(*(x.clone() for x in plan.values))) for _ in range(2))
    kernels.sequence_objective(slice(0, sequences), None, whole, params)
    for row, truth in zip(whole.values.columns, exact.values.columns, strict=True):
        largest = float(truth.abs().max()) if truth.numel() else 0.0  # of what a sum over a sequence may be made
        torch.testing.assert_close(row.double(), truth, rtol=3e-5, atol=3e-6 * max(1.0, largest))
    assert torch.equal(whole.values.lse, plan.values.lse)

    first = draw.choices.randint(0, sequences)
    some = slice(first, draw.choices.randint(first, sequences))
    kernels.sequence_objective(some, None, part, params)
    start, stop = plan.offsets[some.start], plan.offsets[some.stop]
    assert torch.equal(part.values.columns[:, start:stop], whole.values.columns[:, start:stop])
    for outside in (slice(0, start), slice(stop, None)):
        assert torch.equal(part.values.columns[:, outside], plan.values.columns[:, outside])


def check_sums(kernels: Kernels, case: int, lengths: Lengths = None) -> None:
    """Against float64, which the walk over variants compares with the reference's metrics; the same bits twice."""
    draw = Draw(200 + case)
    plan, params = scored_batch(draw, case, lengths)
    coefficients.token_objective(Rows(0, plan.scored.numel()), plan.table, plan.values, params)
    plan.table[FIELD["weight_direct"], ::5], plan.values.value[::5] = 0.0, math.inf  # weight 0: must not count
    plan.table[:, ~plan.scored], plan.values.columns[:, ~plan.scored] = math.nan, math.nan
    groups = draw.choices.randint(1, 4)
    group_index = torch.randint(0, groups, (plan.lengths.numel(),), generator=draw.generator)
    if draw.choices.random() < 0.3:
        group_index, groups = None, 0
    found = kernels.sums(plan, params, group_index, groups)
    expected = column_sums(exactly(plan), params, group_index, groups)
    assert found.numbers.dtype == torch.float32
    assert (found.num_sequences, found.num_groups) == (expected.num_sequences, expected.num_groups)
    torch.testing.assert_close(found.numbers.double(), expected.numbers, rtol=1e-5, atol=1e-5)
    assert torch.equal(kernels.sums(plan, params, group_index, groups).numbers, found.numbers)


# --- finished gradients ---------------------------------------------------------------------------------------------


def check_scale(kernels: Kernels, dtype: torch.dtype, count: int, shift: int = 0, keeps_nan: bool = True) -> None:
    """x *= factor in float32, rounded once; what lies around x stays. With `keeps_nan` factor 1 touches nothing: any
    arithmetic would make a signalling NaN a quiet one. A usual loss scale, 65,536, is infinite in float16; 1.003 is 1
    in bfloat16."""
    g = torch.Generator().manual_seed(count)
    values = (torch.randn(1, count, generator=g) * 100).to(dtype)
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-6, 6e4]).to(dtype)
    values[0, : len(special)] = special[:count]
    for factor in (1.003, -2.0, 1 + 2.0**-23, 0.0, 65536.0, 1e30, math.inf, math.nan):
        x, around = placed(values, count, shift)
        before = around.clone()
        kernels.scale(x, torch.tensor(factor))
        expected = (values.float() * factor).to(dtype)
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
        x.copy_(values)
        torch.testing.assert_close(around, before, rtol=0, atol=0, equal_nan=True)
    x, around = placed(values, count, shift)
    bits = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits.fill_(SIGNALLING[dtype])
    before = bits.clone()
    kernels.scale(x, torch.tensor(1.0))
    assert torch.equal(bits, before) or not keeps_nan


# --- kept ids -------------------------------------------------------------------------------------------------------

# Columns beyond a vector, a tile of Triton's (128, 512), and a block of CUDA's (1,024 in float32, 2,048 in 16 bits).
KEPT_WIDTHS = (1, 7, 131, 515, 1031, 2053)
KEPT_COUNTS = (0, 1, 3, 4, 5, 15, 16, 17, 31, 32)  # ids of a row: groups of 4, tiles of 16, with and without a rest


def make_kept(tokens: int, vocab: int, seed: int = 0) -> KeptIds:
    """Rows of tokens in no order. Most keep id 0 and the last id, none id 7."""
    rng = random.Random(seed)
    others = [i for i in range(1, vocab - 1) if i != 7]
    rows = [[0, *sorted(rng.sample(others, n - 2)), vocab - 1] if n > 1 else [0] * n for n in KEPT_COUNTS * 2]
    ids = torch.tensor([row + [-1] * (max(KEPT_COUNTS) - len(row)) for row in rows], dtype=torch.int32)
    return KeptIds(Rows(0, len(rows), torch.tensor(rng.sample(range(tokens), len(rows)))), ids)


def check_kept_ids(kernels: Kernels, dtype: torch.dtype) -> None:
    """The rows of ids of a whole vocabulary, and of slices of it, from a mask with ids that no vocabulary has."""
    tokens, vocab = 23, 300
    rng = random.Random(0)
    rows = [sorted(rng.sample(range(vocab), n)) for n in (0, 1, 2, 63, 64, 65, 127, 128, *[9] * 15)]
    sampled = [rng.choice(row) if row and t % 3 else rng.randrange(vocab) for t, row in enumerate(rows)]
    rows[9][-1], rows[10][0], rows[11][-1], sampled[12], sampled[13] = vocab, -1, 2**31 - 1, vocab, -1
    counts = torch.tensor([len(row) for row in rows])
    mask = TokenMask(torch.tensor([i for row in rows for i in row], dtype=dtype), counts, counts.cumsum(0))
    index = rng.sample(range(1, tokens), tokens - 1)
    for own in (range(vocab), range(100), range(100, 220), range(220, vocab)):
        ids = torch.full((len(index), 132), 7, dtype=torch.int32)
        token_of, columns = ids.clone(), torch.full((tokens,), 7)
        found = KeptRows(KeptIds(Rows(0, len(index), torch.tensor(index)), ids), token_of, columns, torch.ones(22) > 2)
        kernels.kept_ids(mask, torch.tensor(sampled), own, vocab, found)
        assert columns[0] == 7 and (token_of == torch.tensor(index)[:, None]).all()
        for i, token in enumerate(index):
            row, column, added = ids[i].tolist(), int(columns[token]), bool(found.added[i])
            assert added == (sampled[token] not in rows[token])
            if token in (9, 10, 11, 12, 13):
                assert column == -1 and all(-1 <= x < len(own) for x in row)
                continue
            here = [x for x in rows[token] if x in own]
            here += [sampled[token]] if added and sampled[token] in own else []
            assert row == [x - own.start for x in here] + [-1] * (132 - len(here))
            assert column == (here.index(sampled[token]) if sampled[token] in own else -1)


def check_kept(kernels: Kernels, width: int, dtype: torch.dtype, *, wide: bool, shift: int = 0) -> None:
    """The three products, gradients in float32 (`wide`) or in `dtype`; each twice, to the same bits."""
    tokens, vocab, out = 23, 37, torch.float32 if wide else dtype
    g = torch.Generator().manual_seed(width)

    def matrix(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return placed(torch.randn(rows, width, generator=g), width + 3, shift, dtype)

    hidden, weight, bias = matrix(tokens, dtype)[0], matrix(vocab, dtype)[0], torch.randn(vocab, generator=g)
    kept = make_kept(tokens, vocab, seed=width)
    (count, slots), index, used = kept.ids.shape, kept.rows.index, kept.ids >= 0
    rows = kept.ids.clamp(min=0).long()
    h, w = hidden.double()[index], weight.double()[rows]

    for given in (bias, None):
        found = torch.full((2, count, slots), 7.5)
        for logits in found:
            kernels.kept_logits(hidden, weight, given, kept, logits)
        expected = torch.einsum("ch,ckh->ck", h, w) + (0.0 if given is None else given.double()[rows])
        check_product(found, expected.masked_fill(~used, -math.inf), width)

    factors = torch.randn(count, slots, generator=g)
    dlogits = torch.where(used, factors, math.nan)  # what unused places hold is not read
    factors = torch.where(used, factors, 0.0).double()
    pairs = KeptPairs(kept.ids.view(-1), index.to(torch.int32).repeat_interleave(slots))
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
                kernels.kept_dhidden(dlogits, weight, kept, x)
            else:
                kernels.kept_dweight(dlogits.view(-1), hidden, pairs, x, add="added" in kind)
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
