"""The model of the limit: FLOPs, bytes, time and memory of a case for each way to compute it, on a named device.

A FLOP is half of a multiply-add. A part is one kind of kernel. It takes the longer of its computing and its memory
traffic. Computing includes the waves of tiles that are not full (gemm.py), and some traffic overlaps with nothing: of
the results that are wider than the inputs, and of an accumulator that is read and written, the share gemm.EXPOSED.
Parts follow one another on one stream, so that a row pass overlaps with no product. `seconds_apart` is the sum where
nothing at all overlaps: a measurement should not exceed it.

A call waits for the host until the first product is launched, which includes one read of the counts of rows, and every
kernel starts a gap after the one before it.

A `Design` says how a call is cut: the rows of logits that are held at a time (row chunk) and the rows that the products
for dhidden and dweight take (product chunk), which are the same rows or several row chunks.

Traffic is counted as if caches were ideal: each operand of a product moves once per chunk, and a row kernel reads each
logit once, although some sweep a row twice. Left out: exponentials of row kernels, what is O(N), the gathering of rows
where some are dropped, the memory of workspaces of the matrix library.

Memory is what the benchmarks measure: the high-water mark, less the inputs and less the gradients that are returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..engine.memory import ROUNDED_CHUNKS, capacity_of, chunk_sizes, default_logits_dtype, gpu_capacity
from .cases import Case
from .devices import Device, find_device
from .gemm import EXPOSED, Gemm, idle_seconds

WAYS = {
    "floor": "the matrix products that the mode needs, over all tokens at once",
    "rows": "logits, a row kernel, two products: 6 NHV",
    "unscored": "rows, without the zero-gradient tokens (score_inactive=False)",
    "linear": "rows; log-probabilities alone come from a product with a softmax in its epilogue",
    "anchored": "exponentials relative to the sampled token from the epilogue, no row kernel",
    "staged": "rows for losses over whole sequences: statistics, then the gradient, from the same logits",
    "recompute": "logits twice, 8 NHV, for zero-gradient tokens too: the lower bound of TRL, Liger and verl",
    "kept": "a row of the weight and one of the hidden states read per kept id of a sampling mask",
    "eager": "all logits at once and autograd, each pass reading and writing once",
}
PARTS = ("logits", "epilogue", "row passes", "dhidden", "dweight", "finish")

# Of backends/triton/matmul.py: hidden states that stay in the L2 cache while the weight is read once.
GROUP_BYTES = 16 << 20
# Per logit, beside the product and not overlapped with it: the estimate of backends/triton/anchored.py.
EPILOGUE_INSTRUCTIONS = 20
EAGER_LAUNCHES, FLOOR_LAUNCHES = 60, 3
# Of products over kept ids: operators that sort and place them, estimated; bytes per kept id that they may hold.
KEPT_LAUNCHES, KEPT_BYTES = 110, 64
# Share of a copy's bandwidth that a row kernel reaches on a GPU: assumed.
ROW_RATE = 0.9


@dataclass(frozen=True)
class Design:
    """How the engine cuts a call into chunks, and what the host does for it.

    `row_chunk`, `product_chunk`: rows at most; the last chunk of a call may be shorter. A product chunk longer than a
    row chunk has a buffer of its own for the gradients of its logits. `launches`: by mode, those of a call
    beside its chunks, and of these the ones before the first product. `launch_cost`: host time of a launch with the
    Python around it, in units of Device.launch. `row_rate`: the row kernel's share of a copy's bandwidth.
    """

    row_chunk: int
    product_chunk: int
    launches: Mapping[str, tuple[int, int]] = field(hash=False)
    launches_per_row_chunk: int
    launches_per_product_chunk: int
    launch_cost: float
    row_rate: float = ROW_RATE


# 71 launches of a step with one chunk, 44 of them before the first product, took 690 to 725 us of a host; those of
# "forward" were counted with torch.profiler.
_REVIEWED = Design(4096, 4096, {"step": (61, 44), "frozen": (61, 44), "forward": (20, 15)}, 6, 4, launch_cost=2.5)
# Assumed until it is built and counted: a kernel for the plan and one that reduces with the operators around them, per
# row chunk a product and the row kernel, per product chunk two products. A mock with five launches took 77 us.
_LAUNCHES = {"step": (8, 3), "frozen": (8, 3), "forward": (5, 3)}
_CURRENT = Design(2048, 16384, _LAUNCHES, 2, 2, launch_cost=4.0)
DESIGNS = {
    "92afbdc": _REVIEWED,
    "product chunks of 8,192": Design(2048, 8192, _LAUNCHES, 2, 2, launch_cost=4.0),
    "product chunks of 16,384": Design(2048, 16384, _LAUNCHES, 2, 2, launch_cost=4.0),
}


class Part(NamedTuple):
    """`flops` of matrix products, `bytes` to and from memory; seconds of computing and of moving, each alone.

    `idle`: seconds that computing lasts longer because tiles do not fill their waves. `exposed`: seconds of `moving`
    that overlap with no computing.
    """

    name: str
    flops: int
    bytes: int
    computing: float
    moving: float
    idle: float = 0.0
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.computing + self.idle, self.moving - self.exposed) + self.exposed


@dataclass(frozen=True)
class Prediction:
    """What one call costs."""

    parts: tuple[Part, ...]
    waiting: float  # seconds of the device, until the host has launched the first product
    issuing: float  # seconds of the host for all other launches, hidden where the device takes longer
    gaps: float  # seconds of the device between kernels
    peak_bytes: int
    given_bytes: int  # inputs and returned gradients, which come on top

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def seconds(self) -> float:
        return self.waiting + max(self.issuing, self.gaps + sum(part.seconds for part in self.parts))

    @property
    def seconds_apart(self) -> float:
        parts = sum(part.computing + part.idle + part.moving for part in self.parts)
        return self.waiting + max(self.issuing, self.gaps + parts)


def ways(case: Case, device: Device) -> tuple[str, ...]:
    """The names in WAYS that serve a case on a device."""
    folds = device.type == "cuda" and case.torch_dtype.itemsize == 2
    serves = {
        "unscored": case.mode != "forward",
        "linear": folds,
        "anchored": folds and case.dtype != "float16",  # which cannot hold e^(z - z_id)
        "staged": case.mode != "forward",
        "kept": case.kept_ids > 0,
    }
    return tuple(way for way in WAYS if serves.get(way, True))


def way_of(implementation: str, kept_ids: int = 0) -> str | None:
    """The way of an implementation of the benchmarks, by its name and Case.kept_ids; None where there is no model."""
    name, _, rest = implementation.partition("-")
    if name == "ours":
        last = rest.rpartition("-")[2]
        if kept_ids and last != "unmasked":
            return "kept"
        return last if last in WAYS else "rows"
    peers = dict.fromkeys(("trl", "liger", "verl", "cut"), "recompute")
    return peers.get(name, name if name in ("floor", "eager") else None)


def default_design(case: Case, device: Device, way: str = "rows") -> Design:
    """The design of this version of the library: chunks by memory.py, launches as counted last. Peers, of which a lower
    bound is wanted, get the longest chunks on a GPU."""
    kind, on_cpu = torch.device(device.type), device.type == "cpu"
    if way == "recompute" and not on_cpu:
        return _CURRENT
    logits_dtype = default_logits_dtype(case.torch_dtype, kind)
    grad_dtype = logits_dtype if on_cpu else case.torch_dtype
    memory = device.memory if math.isfinite(device.memory) else 0
    capacity = capacity_of(kind) if on_cpu else gpu_capacity(memory, device.multiprocessors)
    shape, wants = (case.vocab_size, case.hidden_size), (case.mode != "forward", case.mode == "step", False)
    sizes = chunk_sizes(case.tokens, shape, logits_dtype, grad_dtype, kind, wants, capacity=capacity)
    rows, products = sizes.logits, sizes.products
    if way == "staged":
        rows = products = _packed(case, sizes.packed_rows(case.length))
    elif on_cpu:  # cut into nearly equal parts
        products = _even(case.tokens, products)
        rows = _even(products, rows)
    return replace(_CURRENT, row_chunk=rows, product_chunk=products)


def _packed(case: Case, most: int) -> int:
    """Rows of the whole sequences that `most` rows have room for. (Longer ones would not be staged.)"""
    return most if case.tokens <= most or case.length > most else most // case.length * case.length


def _even(count: int, most: int) -> int:
    return -(-count // -(-count // most))


def predict(
    case: Case, device: Device, way: str = "rows", design: Design | None = None, exposed: float = EXPOSED
) -> Prediction:
    """What `way` should cost, by default in `default_design`. ValueError where it does not serve the case.

    `exposed`: the share, from 0 to 1, of the traffic of wide results that overlaps with nothing; see gemm.py.
    """
    served = ways(case, device)
    if way not in served:
        raise ValueError(f"{way!r} does not serve {case} on {device.name}; expected one of {', '.join(served)}")
    return {"floor": _floor, "eager": _eager, "kept": _kept}.get(way, _chunked)(
        _Work(case, device, way, design or default_design(case, device, way), exposed)
    )


def predictions(case: Case, device: torch.device) -> dict[str, Any]:
    """For the JSON of a run: {"device", "source", "ways": way -> seconds, seconds_apart, flops, bytes, peak_bytes}."""
    rates = find_device(str(device), case)
    fields = ("seconds", "seconds_apart", "flops", "bytes", "peak_bytes")
    found = {way: predict(case, rates, way) for way in ways(case, rates)}
    table = {way: {field: getattr(prediction, field) for field in fields} for way, prediction in found.items()}
    return {"device": rates.name, "source": rates.source, "ways": table}


# --- the work of a case ---------------------------------------------------------------------------------------------


def idle_tokens(case: Case) -> int:
    """Zero-gradient tokens: those of prompts with equal rewards, where there is no KL term."""
    if case.beta != 0:
        return 0
    per_prompt = case.length * case.generations
    share = 1.0 if case.generations == 1 else case.idle_share  # the reward of a single completion is its own mean
    return round(case.tokens // per_prompt * share) * per_prompt


class _Work:
    """A case in numbers. Of N tokens `active` get gradients, `scored` others their log-probabilities alone."""

    def __init__(self, case: Case, device: Device, way: str, design: Design, exposed: float) -> None:
        self.case, self.device, self.way, self.design = case, device, way, design
        self.exposed = exposed if device.multiprocessors else 0.0
        self.row_rate = 1.0 if device.type == "cpu" else design.row_rate
        self.tokens, self.width, self.vocab = case.tokens, case.hidden_size, case.vocab_size
        self.weight = self.vocab * self.width  # elements
        idle = 0 if way in ("floor", "eager", "recompute") else idle_tokens(case)
        self.active = 0 if case.mode == "forward" else self.tokens - idle
        self.scored = 0 if way == "unscored" else self.tokens - self.active
        self.trained = case.mode == "step" and self.active > 0

        # Bytes of an element: of the inputs, of logits, of their gradient, of the sums that become dweight.
        kind, on_cpu = torch.device(device.type), device.type == "cpu"
        self.item = case.torch_dtype.itemsize
        self.logit = default_logits_dtype(case.torch_dtype, kind).itemsize
        self.gradient = self.logit if on_cpu else self.item
        few = ROUNDED_CHUNKS if on_cpu else 1  # chunks whose sum is rounded as it is
        self.sum = self.gradient if self.tokens <= few * design.product_chunk else 4
        returned = {"step": self.operands(self.tokens, 1), "frozen": self.operands(self.tokens, 0), "forward": 0}
        self.returned = returned[case.mode]

    def operands(self, tokens: int, weight_reads: int) -> int:
        """Bytes of hidden states (or dhidden), once, and of the weight."""
        return (tokens * self.width + weight_reads * self.weight) * self.item

    def logits(self, rows: int) -> Gemm:
        return Gemm(rows, self.vocab, self.width)

    def dhidden(self, rows: int) -> Gemm:
        return Gemm(rows, self.width, self.vocab)

    def dweight(self, rows: int) -> Gemm:
        return Gemm(self.vocab, self.width, rows)

    def product(self, name: str, gemms: list[tuple[int, Gemm]], bytes: int, wide: int = 0) -> Part:
        """`gemms`: how many of each. `wide`: bytes of results beyond those of a product in the type of the inputs."""
        rate, moving = self.device.flops[self.case.dtype], bytes / self.device.bandwidth
        flops = sum(count * gemm.flops for count, gemm in gemms)
        idle = sum(count * idle_seconds(gemm, self.device, self.case.dtype) for count, gemm in gemms)
        exposed = self.exposed * max(0, wide) / self.device.bandwidth
        return Part(name, flops, bytes, flops / rate, moving, idle, exposed)

    def pass_over(self, name: str, bytes: int, rate: float = 1.0) -> Part:
        """`rate`: the share of a copy's bandwidth."""
        return Part(name, 0, bytes, 0.0, bytes / (self.device.bandwidth * rate))

    def prediction(self, parts: list[Part], peak: int, launches: int, before: int = 0, cost: float = 1.0) -> Prediction:
        """`launches`: all of them, `before` those that the first product waits for, and then for the counts of rows."""
        launch = self.device.launch * cost
        waiting = before * launch + (self.device.read if before else 0.0)
        gaps = (launches - before) * self.device.gap
        given = self.operands(self.tokens, 1) + self.returned
        return Prediction(tuple(parts), waiting, (launches - before) * launch, gaps, peak, given)


def _cut(tokens: int, rows: int) -> list[tuple[int, int]]:
    """(how many, length) of the chunks of `rows` each that `tokens` are cut into, and of the shorter last one."""
    full, last = divmod(tokens, rows)
    return [(n, m) for n, m in ((full, rows), (1, last)) if n and m]


class _Sweep(NamedTuple):
    """A pass over `tokens`: its product writes `written` bytes per logit, its row kernels transfer `moved` bytes.

    `cuts`: rows of its chunks, each cut by the next.
    """

    tokens: int
    written: int
    moved: int
    cuts: tuple[int, ...]
    folded: bool = False

    def chunks(self) -> list[tuple[int, int]]:
        """(how many, length) of its row chunks."""
        found = [(1, self.tokens)]
        for rows in self.cuts:
            found = [(n * m, longer) for n, length in found for m, longer in _cut(length, rows)]
        return found


def _sweeps(w: _Work) -> list[_Sweep]:
    row_cut, cuts = (w.design.row_chunk,), (w.design.product_chunk, w.design.row_chunk)
    gradients = _Sweep(w.active, w.logit, w.logit + w.gradient, cuts)
    scores = _Sweep(w.scored, w.logit, w.logit, row_cut)
    if w.way == "anchored":  # no logits to hold: a product chunk at once
        gradients = _Sweep(w.active, w.gradient, 0, cuts[:1], folded=True)
    if w.way == "staged":
        gradients = _Sweep(w.active, w.logit, 2 * w.logit + w.gradient, cuts)
    if w.way in ("anchored", "linear"):
        scores = _Sweep(w.scored, 0, 0, row_cut, folded=True)
    if w.way == "recompute":
        scores = _Sweep(w.tokens, w.logit, w.logit, row_cut)
    return [sweep for sweep in (gradients, scores) if sweep.tokens]


def _chunked(w: _Work) -> Prediction:
    """The ways through the engine."""
    sweeps, design = _sweeps(w), w.design
    chunks = [(sweep, n, length) for sweep in sweeps for n, length in sweep.chunks()]
    reads = sum(n * (-(-length * w.width * w.item // GROUP_BYTES) if s.folded else 1) for s, n, length in chunks)
    tokens = sum(s.tokens for s in sweeps)
    folded = sum(s.tokens for s in sweeps if s.folded)
    written = w.vocab * sum(s.tokens * s.written for s in sweeps)
    wide = w.vocab * sum(s.tokens * max(0, s.written - w.item) for s in sweeps)
    gemms = [(n, w.logits(length)) for _, n, length in chunks]
    # An instruction is a multiply-add of a product without tensor cores.
    instructions = folded * w.vocab * EPILOGUE_INSTRUCTIONS
    epilogue = instructions / (w.device.flops["float32"] / 2) if instructions else 0.0
    parts = [
        w.product("logits", gemms, w.operands(tokens, reads) + written, wide),
        Part("epilogue", 0, 0, epilogue, 0.0),
        w.pass_over("row passes", w.vocab * sum(s.tokens * s.moved for s in sweeps), w.row_rate),
        *_gradients(w),
    ]
    row_chunks, product_chunks = sum(n for _, n, _ in chunks), sum(n for n, _ in _cut(w.active, design.product_chunk))
    launches, before = design.launches[w.case.mode]
    per_chunk = design.launches_per_row_chunk * row_chunks + design.launches_per_product_chunk * product_chunks
    return w.prediction(parts, _peak(w, sweeps), launches + per_chunk, before, design.launch_cost)


def _peak(w: _Work, sweeps: list[_Sweep]) -> int:
    """Bytes beyond inputs and returned gradients."""
    product_chunk = _cut(w.tokens, w.design.product_chunk)[0][1]
    row_chunk = _cut(product_chunk, w.design.row_chunk)[0][1]
    if w.way == "anchored" and w.active:  # a chunk of dhidden, its scaled copy in float32, and that rounded
        peak = product_chunk * (w.vocab * w.gradient + w.width * (4 + 2 * w.item))
    else:
        peak = row_chunk * w.vocab * max((s.written for s in sweeps), default=0)
        if w.active and product_chunk > w.design.row_chunk:  # else gradients lie over their logits
            peak += product_chunk * w.vocab * w.gradient
    if w.trained:  # the scratch is free before the sums are cast
        cast = w.weight * w.item if w.sum != w.item else 0
        peak = max(peak, cast) + w.weight * (w.sum - w.item)
    return peak


def _gradients(w: _Work) -> Iterator[Part]:
    cut, dlogits, elements = _cut(w.active, w.design.product_chunk), w.active * w.vocab * w.gradient, w.active * w.width
    chunks = sum(n for n, _ in cut)
    anchored, finish = w.way == "anchored", 0
    if w.active:
        gemms = [(n, w.dhidden(length)) for n, length in cut]
        yield w.product("dhidden", gemms, dlogits + w.operands(w.active, chunks))
        finish += elements * (8 + 4 * w.item) * anchored  # scaled in float32, rounded, put in place
    if w.trained:
        sums = (2 * chunks - 1) * w.weight * w.sum  # the first chunk writes them, the others read and write
        gemms = [(n, w.dweight(length)) for n, length in cut]
        moved = dlogits + w.operands(w.active, 0) + sums
        yield w.product("dweight", gemms, moved, sums - chunks * w.weight * w.item)
        finish += elements * (8 + 2 * w.item) * anchored  # the scaled hidden states
        finish += w.weight * (w.sum + w.item) * (w.sum != w.item)
    yield w.pass_over("finish", finish)


def _kept(w: _Work) -> Prediction:
    """Products over kept ids (engine/kept.py): bound by memory, where each row is read from it every time. The tokens
    without a mask are a smaller case of `rows`."""
    masked = round(w.tokens * w.case.masked_share)
    pairs, read = masked * w.case.kept_ids, w.row_rate * w.device.bandwidth
    bytes = (pairs + masked) * w.width * w.item
    names = [name for name, wanted in (("logits", True), ("dhidden", w.active), ("dweight", w.trained)) if wanted]
    written = {"dweight": w.weight * w.item}
    moved = {name: bytes + written.get(name, 0) for name in names}
    parts = [Part(name, 2 * pairs * w.width, moved[name], 0.0, moved[name] / read) for name in names]
    peak, launches, (_, before) = KEPT_BYTES * pairs, KEPT_LAUNCHES, w.design.launches[w.case.mode]
    w.tokens, w.active, w.scored = w.tokens - masked, max(0, w.active - masked), max(0, w.scored - masked)
    if not w.tokens:
        return w.prediction(parts, peak, launches, before, w.design.launch_cost)
    rest = _chunked(w)
    return replace(rest, parts=(*parts, *rest.parts), peak_bytes=rest.peak_bytes + peak)


def _eager(w: _Work) -> Prediction:
    """implementations/torch_.py: logits, float32 copy, log_softmax; backward in float32 as far as the first product."""
    logits, cast = w.tokens * w.vocab, w.item + 4 if w.item < 4 else 0  # bytes per logit
    moved, held = cast + 8, max(cast, 8)  # log_softmax has float32 in and out
    if w.active:
        moved, held = moved + 4 + 12 + cast, 12  # the gradient of its output; of its input, from that and its output
    rows = w.pass_over("row passes", logits * moved)
    peak = max(held * logits - w.returned, logits * w.item)  # before the gradients are there, or with them
    return w.prediction([*_bare_products(w), rows], peak, EAGER_LAUNCHES)


def _floor(w: _Work) -> Prediction:
    return w.prediction(_bare_products(w), w.tokens * w.vocab * w.item, FLOOR_LAUNCHES)


def _bare_products(w: _Work) -> list[Part]:
    """Over all tokens at once, logits and their gradient in the type of the inputs."""
    names = {"step": ("logits", "dhidden", "dweight"), "frozen": ("logits", "dhidden"), "forward": ("logits",)}
    gemms = {"logits": w.logits(w.tokens), "dhidden": w.dhidden(w.tokens), "dweight": w.dweight(w.tokens)}
    moved = w.tokens * w.vocab * w.item + w.operands(w.tokens, 1)
    return [w.product(name, [(1, gemms[name])], moved) for name in names[w.case.mode]]
