"""What kernels of rows must do, against float64. Each check raises AssertionError.

`kernels` is a table of operations; emulator.Emulated runs the CUDA kernels on an emulated GPU, on the device and in the
order of threads that have been chosen there. tests/test_cuda_faults.py runs the checks on kernels with planted faults.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.kernels.operations import (
    HeadChunk,
    LogitChunk,
    PolicyTransform,
    Rows,
    RowScales,
    Statistics,
)  # fmt: skip

Kernels = Any
VOCABS = (1, 2, 15, 16, 63, 64, 65, 1000, 2047, 2048, 2049, 5003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(t, t) for t in DTYPES] + [(torch.float32, t) for t in DTYPES[1:]]  # logits, gradient
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a last place
SIGNALLING = {torch.float32: 0x7F800001, torch.bfloat16: 0x7F81, torch.float16: 0x7C01}  # a NaN of each type, as bits
PLAIN = PolicyTransform()


def filled_statistics(tokens: int) -> Statistics:
    """Memory that a kernel must write over or leave alone."""
    stats = Statistics.empty(tokens, torch.device("cpu"))
    for x in stats:
        x.fill_(7.5)
    return stats


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
    logits: Tensor, ids: Tensor, temperature: Tensor, transform: PolicyTransform = PLAIN, bias: Tensor | None = None
) -> tuple[Tensor, Statistics]:
    """Returns u = logits + bias, which is rounded to float32, and the statistics of its rows, differentiable in u; in
    float64. Ids are in the vocabulary."""
    u = (logits if bias is None else logits.float() + bias).double().requires_grad_()
    z = transform.logit_scale * u
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
        z = torch.where(u == -math.inf, u.detach(), z)  # an excluded id stays one
    z = z / temperature.double()[:, None]
    lse = z.logsumexp(-1)
    log_p = z - lse[:, None]
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return u, Statistics(log_p.gather(1, ids[:, None])[:, 0], lse, entropy)


def check_gradient(grad: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Within the rounding of the gradient's type, plus an fp32 error of the row's own size."""
    bound = expected.abs() * (UNIT[grad.dtype] * 1.01 + 1e-5) + scale.double().abs()[:, None] * 1e-6
    if grad.dtype == torch.float16:
        bound = bound + 2.0**-25
    assert ((grad.double() - expected).abs() <= bound).all()


def check_statistics(found: Statistics, expected: Statistics, tolerance: float = 2e-6) -> None:
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), truth.detach().double(), rtol=tolerance / 4, atol=tolerance)


def check_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=0, equal_nan=True)


# --- rows -----------------------------------------------------------------------------------------------------------
# Of a batch whose tokens are the rows, in order.


def chunk_of(logits: Tensor, ids: Tensor, temperature: Tensor, transform: PolicyTransform) -> LogitChunk:
    return LogitChunk(logits, Rows(0, len(ids)), ids, temperature, filled_statistics(len(ids)), transform)


def statistics(
    kernels: Kernels, logits: Tensor, ids: Tensor, temperature: Tensor, transform: PolicyTransform = PLAIN
) -> Statistics:
    chunk = chunk_of(logits, ids, temperature, transform)
    kernels.statistics(chunk)
    return chunk.stats


def gradient(
    kernels: Kernels, logits: Tensor, grad: Tensor, ids: Tensor, temperature: Tensor, stats: Statistics, dlogp: Tensor,
    dentropy: Tensor, transform: PolicyTransform = PLAIN
) -> None:  # fmt: skip
    chunk = chunk_of(logits, ids, temperature, transform)._replace(stats=stats)
    kernels.gradient(chunk, dlogp, dentropy, grad)


def of_rows(stats: Statistics, rows: Rows) -> Statistics:
    """Returns a copy of those of a chunk's tokens."""
    return Statistics(*(rows.take(x).clone() for x in stats))


def spread(rows: Rows, tokens: int, x: Tensor, elsewhere: float = math.nan) -> Tensor:
    """Per row -> per token, with something at all other tokens that must not be looked at."""
    out = torch.full((*x.shape[:-1], tokens), elsewhere, dtype=x.dtype)
    rows.put(out.movedim(-1, 0), x.movedim(-1, 0))
    return out


def check_written(rows: Rows, stats: Statistics) -> None:
    """Nothing of any other token has been written."""
    for value, untouched in zip(stats, filled_statistics(len(stats.lse)), strict=True):
        rows.put(untouched, rows.take(value))
        torch.testing.assert_close(value, untouched, rtol=0, atol=0, equal_nan=True)


def check_rows(
    kernels: Kernels,
    vocab: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    transform: PolicyTransform = PLAIN,
    shift: int = 0,
    biased: bool = False,
) -> None:
    """statistics and gradient of a few rows, all at a row stride of their own, each called twice: for neighbours among
    the tokens, and for a list of tokens."""
    count, tokens = 5, 11
    values, ids = make_logits(count, vocab, dtypes[0])
    logits, _ = placed(values, vocab + 3, shift)
    bias = torch.randn(shift % 5 + vocab)[shift % 5 :] if biased else None
    temperature = torch.tensor([1.0, 0.7, 1.0, 1.3, 2.0])
    # The third row has a zero gradient.
    dlogp, dentropy = torch.tensor([1.0, -0.3, 0.0, 0.0, 2.0]), torch.tensor([0.0, 0.5, 0.0, -1.0, 0.1])
    u, truth = exact(values, ids, temperature, transform, bias)
    expected = torch.autograd.grad((dlogp * truth.logp + dentropy * truth.entropy).sum(), u)[0]
    scale = (dlogp.abs() + dentropy.abs() * 8) * transform.logit_scale / temperature

    results = []
    for rows in (Rows(3, 8), Rows(0, count, torch.tensor([7, 2, 9, 0, 4]))):
        t_temperature, t_dlogp, t_dentropy = (spread(rows, tokens, x) for x in (temperature, dlogp, dentropy))
        stats = filled_statistics(tokens)
        chunk = LogitChunk(logits, rows, spread(rows, tokens, ids, 10**15), t_temperature, stats, transform, bias)
        kernels.statistics(chunk)
        check_statistics(of_rows(stats, rows), truth)
        check_written(rows, stats)
        if biased and dtypes[0] == torch.float32:  # the bits of logits that hold the bias
            added = filled_statistics(tokens)
            holding = placed(values + bias, vocab + 3, shift)[0]
            kernels.statistics(chunk._replace(logits=holding, bias=None, stats=added))
            check_equal(added, stats)

        grad, around = placed(torch.zeros(count, vocab), vocab + 5, shift + 1, dtypes[1])
        kernels.gradient(chunk, t_dlogp, t_dentropy, grad)
        check_gradient(grad, expected, scale)
        sampled, rounding = (torch.arange(count), ids), torch.finfo(dtypes[1]).eps / 2
        torch.testing.assert_close(grad[sampled].double(), expected[sampled], rtol=5e-6 + rounding, atol=1e-6)
        assert not grad[2].any()
        results.append((*of_rows(stats, rows), grad.clone()))
        grad.fill_(7.5)  # nothing else in the buffer has been touched
        assert (around == 7.5).all()
    assert torch.equal(logits, values)
    check_equal(results[1], results[0])


def over_the_front(logits: Tensor, buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a matrix of `dtype` in the memory of `logits`, a view into `buffer`, each row where theirs begins."""
    ratio = logits.element_size() // dtype.itemsize
    return buffer.view(dtype)[logits.storage_offset() * ratio :].as_strided(logits.shape, (ratio * logits.stride(0), 1))


def check_in_place(kernels: Kernels, vocab: int, dtypes: tuple[torch.dtype, torch.dtype], shift: int = 0) -> None:
    """Over the logits of the same type, or 16-bit over the front of the fp32 rows that they come from: the bits of a
    gradient elsewhere."""
    rows = 4
    values, ids = make_logits(rows, vocab, dtypes[0])
    ones, dentropy = torch.ones(rows), torch.tensor([0.0, 0.2, 0.0, 0.0])
    logits, buffer = placed(values, vocab + 3, shift)
    stats = statistics(kernels, logits, ids, ones)
    over, apart = over_the_front(logits, buffer, dtypes[1]), torch.empty(rows, vocab, dtype=dtypes[1])
    assert over.data_ptr() == logits.data_ptr()
    for grad in (apart, over):
        gradient(kernels, logits, grad, ids, ones, stats, ones, dentropy)
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
    truth = Statistics(*(x.detach() for x in exact(logits, ids, ones)[1]))
    found = statistics(kernels, logits, ids, ones)
    check_statistics(found, truth)
    p = torch.softmax(logits.double(), -1)
    log_p = torch.where(p > 0, logits.double() - truth.lse[:, None], 0.0)
    grad = torch.empty(10, vocab, dtype=dtypes[1])
    for weight in (0.1, 0.0):  # of the entropy
        expected = -p * (1 + weight * (log_p + truth.entropy[:, None]))
        expected[rows, ids] += 1
        dentropy = torch.tensor(weight).expand(10)  # a stride of 0, as autograd gives
        gradient(kernels, logits, grad, ids, ones, found, ones, dentropy)
        check_gradient(grad, expected, ones * 2)
        assert (grad[torch.isneginf(logits)] == 0).all()


def check_absent_and_zero_gradient(kernels: Kernels, dtypes: tuple[torch.dtype, torch.dtype] = PAIRS[0]) -> None:
    vocab = 1100
    logits, _ = make_logits(4, vocab, dtypes[0])
    logits[0, 5] = -math.inf
    grad, ids = torch.empty(4, vocab, dtype=dtypes[1]), torch.tensor([5, -1, vocab, 2**40 + 7])
    zeros = torch.zeros(4)
    stats = statistics(kernels, logits, ids, zeros + 1)
    assert stats.logp[0] == -math.inf
    assert stats.logp[1:].isnan().all()
    assert stats.lse.isfinite().all()
    # A zero-gradient row is not read by `gradient`, and a NaN in it does not come through.
    for row in (logits, logits.masked_fill(torch.arange(vocab) % 7 == 0, math.nan)):
        grad.fill_(math.nan)
        gradient(kernels, row, grad, ids, zeros + 1, stats, zeros, zeros)
        assert not grad.any()
    # A row with no id at all, as of a slice of the vocabulary that holds none of those kept, under the others' lse.
    logits, ids = torch.full_like(logits, -math.inf), torch.full_like(ids, -1)
    others = Statistics(zeros, zeros.double() + 2, zeros)
    for transform in (PLAIN, PolicyTransform(softcap=3.0)):
        assert (statistics(kernels, logits, ids, zeros + 1, transform).lse == -math.inf).all()
        grad.fill_(math.nan)
        gradient(kernels, logits, grad, ids, zeros + 1, others, zeros + 1, zeros + 0.1, transform)
        assert not grad.any()
    for place in (0, 600, vocab - 1):
        logits = torch.zeros(1, vocab, dtype=dtypes[0])
        logits[0, place] = math.nan
        found = statistics(kernels, logits, torch.zeros(1, dtype=torch.int64), torch.ones(1))
        assert all(value.isnan().all() for value in found)


def check_accuracy(kernels: Kernels) -> None:
    """logp is at least as accurate as torch's."""
    ones = torch.ones(64)
    for spread in (1.0, 5.0, 30.0):
        logits, ids = make_logits(64, 32003, torch.float32, spread)
        truth = exact(logits, ids, ones)[1].logp.detach()
        limit = (torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0] - truth).abs().max()
        assert (statistics(kernels, logits, ids, ones).logp - truth).abs().max() <= limit


def near_certain(kernels: Kernels, vocab: int = 2003, softcap: float = 0.0) -> Tensor:
    """(9, 2) float64: the relative errors of 1 - p, from logp, and of the gradient at a sampled id whose 1 - p is about
    1e-1, ... 1e-9."""
    logits, ids = make_logits(9, vocab, torch.float32, 1.0)
    rest_of = logits.double().scatter(1, ids[:, None], -torch.inf)
    at = rest_of.logsumexp(1) + math.log(10.0) * torch.arange(1, 10)
    logits.scatter_(1, ids[:, None], at.float()[:, None])
    transform = PolicyTransform(1.0, softcap)
    z, slope = logits.double(), 1.0
    if softcap:
        slope = 1 - (z.gather(1, ids[:, None])[:, 0] / softcap).tanh().square()
        z = softcap * (z / softcap).tanh()
    others = (z - z.gather(1, ids[:, None])).scatter(1, ids[:, None], -torch.inf).exp().sum(1)
    right, ones = others / (1 + others), torch.ones(9)
    found = statistics(kernels, logits, ids, ones, transform)
    grad = torch.full_like(logits, 7.5)
    gradient(kernels, logits, grad, ids, ones, found, ones, torch.zeros(9), transform)
    of_id = grad.gather(1, ids[:, None])[:, 0].double()
    errors = -found.logp.double().expm1() / right - 1, of_id / (right * slope) - 1
    return torch.stack(errors, 1).abs()


def check_near_certain(kernels: Kernels) -> None:
    """1 - p and the gradient at the sampled id have their digits where all others together are 1e-9."""
    for vocab in (2003, 4096):
        assert near_certain(kernels, vocab).max() < 3e-6, near_certain(kernels, vocab)


def check_sixteen_bits(kernels: Kernels, dtype: torch.dtype, every: int = 1) -> None:
    """16-bit patterns are read exactly; gradients round to nearest even as torch does."""
    patterns = torch.arange(-(2**15), 2**15, every, dtype=torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()]
    rows = patterns[:, None].contiguous()  # V = 1: lse = z
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    lse = statistics(kernels, rows, zeros, torch.ones(len(rows))).lse
    assert torch.equal(lse, patterns.double())

    wide = torch.cat(
        [patterns.float() * 1.00195, torch.logspace(-9, 5.2, 5000 // every), torch.tensor([math.nan, 1e9])]
    )
    logits, ids = torch.zeros(len(wide), 2), torch.zeros(len(wide), dtype=torch.int64)
    half, full = torch.empty(len(wide), 2, dtype=dtype), torch.empty(len(wide), 2)
    ones = torch.ones(len(wide))
    stats = statistics(kernels, logits, ids, ones)
    for grad in (half, full):
        gradient(kernels, logits, grad, ids, ones, stats, wide, 0 * ones)
    torch.testing.assert_close(half, full.to(dtype), rtol=0, atol=0, equal_nan=True)


# --- exponentials ---------------------------------------------------------------------------------------------------


def check_exponentials(
    kernels: Kernels,
    vocab: int,
    transform: PolicyTransform = PLAIN,
    dtype: torch.dtype = torch.float32,
    shift: int = 0,
    biased: bool = False,
) -> None:
    """exponentials of a few rows of logits of this type: apart from them and over their front, for neighbours among the
    tokens and for a list of tokens. -row_scale E is d logp / d logits within the rounding of E, which is 0 at the
    sampled id; `sampled` is it there."""
    count, tokens = 10, 23
    values, ids = make_logits(count, vocab, torch.bfloat16)
    ids[8] = ids[9] = min(5, vocab - 1)
    ids[:8] = torch.where(ids[:8] == ids[8], 0, ids[:8])
    sampled = torch.arange(count), ids
    # Beside plain rows: p near 1; p near e^-40, which float32 holds; p below e^-55, which needs a repair. A softcap
    # keeps logits close, and with one id there is no improbable one.
    values[sampled] += torch.tensor([0, 0, 0, 0, 30, -40, -100, -3000, 0, 0]).bfloat16()
    temperature = torch.tensor([1.0, 0.7, 1.3, 2.0, 1.0, 1.0, 0.8, 1.1, 1.0, 1.0])
    bias = torch.randn(shift % 5 + vocab)[shift % 5 :] if biased else None
    if bias is not None and vocab > 5:
        bias[5] = -math.inf  # excluded everywhere, and sampled by the last two rows
    # hidden @ weight.T is exactly the logits; most rows begin off any alignment.
    hidden = torch.nn.functional.pad(torch.eye(count), (13, 0)).bfloat16()
    weight = torch.nn.functional.pad(values.T, (13, 0))
    u, truth = exact(values, ids, temperature, transform, bias)
    expected = torch.autograd.grad(truth.logp.sum(), u)[0]
    has_nan, outside = 3, 8
    hidden[has_nan, -1] = values[has_nan, vocab // 2] = math.nan
    ids[outside] = (-100, vocab, 2**40 + 7)[shift % 3]
    sound = [i for i in range(count) if i not in (has_nan, outside)]

    results = []
    for rows in (Rows(5, 5 + count), Rows(0, count, torch.tensor([7, 2, 22, 0, 4, 11, 1, 16, 9, 3]))):
        for in_place in (False, True):
            logits, buffer = placed(values, vocab + 3, shift, dtype)
            out, around = placed(torch.zeros(count, vocab), vocab + 5, shift + 1, torch.bfloat16)
            if in_place:
                out, around = over_the_front(logits, buffer, torch.bfloat16), buffer
            stats = filled_statistics(tokens)
            t_ids, t_temperature = spread(rows, tokens, ids, 10**15), spread(rows, tokens, temperature)
            scales = kernels.exponentials(
                LogitChunk(logits, rows, t_ids, t_temperature, stats, transform, bias),
                HeadChunk(hidden, weight, bias, rows, t_ids, t_temperature, stats, transform),
                out,
            )
            assert all(x.dtype == torch.float32 and x.shape == (count,) for x in scales)
            check_written(rows, stats)
            found = of_rows(stats, rows)
            results.append((*found, *scales, out.clone()))
            if in_place:
                logits.fill_(7.5)
            else:
                torch.testing.assert_close(logits, values.to(dtype), rtol=0, atol=0, equal_nan=True)
                out.fill_(7.5)
            assert (around == 7.5).all()  # nothing else in the buffer has been touched
    for result in results[1:]:
        check_equal(result, results[0])
    *_, row_scale, at_id, exps = results[0]
    found = Statistics(*results[0][:3])
    # The entropy of an improbable id's row is a difference of numbers near -logp, of which float32 holds 4e-6.
    check_statistics(*(Statistics(*(x[sound] for x in stats)) for stats in (found, truth)), tolerance=2e-5)
    assert found.lse[has_nan].isnan()
    assert vocab == 1 or all(x[has_nan].isnan() for x in found)
    assert found.logp[outside].isnan() and row_scale[outside].isfinite() and exps[outside].isfinite().all()
    sampled = sampled[0][sound], ids[sound]
    assert at_id[outside] == 0 and exps[sound].isfinite().all() and not exps[sampled].any()
    derivative, unit = -row_scale[:, None].double() * exps.double(), torch.full(exps.shape, UNIT[torch.bfloat16])
    derivative[sampled], unit[sampled] = at_id[sound].double(), UNIT[torch.float32]
    bound = expected.abs() * (unit * 1.01 + 5e-5) + 1e-14  # float64 holds 1 - p to 1e-16 or so
    assert ((derivative - expected).abs() <= bound)[sound].all()


def check_scale_rows(
    kernels: Kernels, width: int, dtypes: tuple[torch.dtype, torch.dtype], is_product: bool, shift: int = 0
) -> None:
    """Rows of x to rows of out, of these types, for neighbours among the tokens and for a list: rounded once. A token
    of dlogp 0 gets 0 whatever its row holds, one without a sampled id no row of the weight."""
    count, tokens, vocab = 10, 23, 19
    g = torch.Generator().manual_seed(width)
    values, dlogp = torch.randn(count, width, generator=g).to(dtypes[0]), torch.randn(count, generator=g)
    weight, ids = torch.randn(vocab, width + 3, generator=g).bfloat16(), torch.randint(vocab, (count,), generator=g)
    scales = RowScales(torch.rand(count, generator=g), torch.rand(count, generator=g))
    values[3], dlogp[3], ids[5], ids[6], scales.sampled[5:7] = math.nan, 0.0, -100, 2**40 + 7, 0.0
    sound = torch.arange(count) != 3
    factors = -dlogp.double()[:, None] * scales.row_scale[:, None], (dlogp * scales.sampled)[:, None].double()
    parts = values.double() * factors[0], factors[1] * weight[ids.clamp(0, vocab - 1), :width].double() * is_product
    expected, size = sum(parts), sum(x.abs() for x in parts)
    bound = expected.abs() * UNIT[dtypes[1]] * 1.01 + size * 4 * UNIT[torch.float32]
    for rows in (Rows(5, 5 + count), Rows(0, count, torch.tensor([7, 2, 22, 0, 4, 11, 1, 16, 9, 3]))):
        x, _ = placed(values, width + 5, shift)
        out, around = placed(torch.full((tokens if is_product else count, width), 7.5), width + 2, shift + 1, dtypes[1])
        head = HeadChunk(
            x, weight[:, :width], None, rows, spread(rows, tokens, ids, 10**15), spread(rows, tokens, dlogp),
            filled_statistics(tokens), PLAIN,
        )  # fmt: skip
        kernels.scale_rows(x, spread(rows, tokens, dlogp), scales, head, out, is_product=is_product)
        found = rows.take(out).clone() if is_product else out.clone()
        assert ((found.double() - expected).abs() <= bound)[sound].all() and not found[3].any()
        if is_product:
            rows.put(out, torch.full_like(found, 7.5))
        else:
            out.fill_(7.5)
        assert (around == 7.5).all()  # nothing else in the buffer has been touched


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
