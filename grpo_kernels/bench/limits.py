"""The model of the limit: FLOPs, bytes, time and memory of a case for each way to compute it, on a named device.

A FLOP is half of a multiply-add. A part is one kind of kernel and takes the longer of its computing and its memory
traffic, as if these overlap perfectly; parts follow one another. `seconds` is that sum of maxima, `seconds_apart` the
sum where nothing overlaps: a measurement should lie between the two.

Traffic is counted as if caches were ideal: each operand of a product moves once per chunk, and a row kernel reads each
logit once, although some sweep a row twice. Left out: exponentials of row kernels, what is O(N), the gathering of rows
where some are dropped, workspaces of the matrix library.

Memory is what the benchmarks measure: the high-water mark, less the inputs and less the gradients that are returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..memory import ROUNDED_CHUNKS, chunk_sizes, default_logits_dtype, gpu_budget, memory_budget
from .cases import Case
from .devices import Device, find_device

WAYS = {
    "floor": "the products that the mode cannot do without, over all tokens at once",
    "rows": "logits, a row kernel, two products: 6 NHV",
    "unscored": "rows, without the tokens that have no gradient (score_inactive=False)",
    "linear": "rows; log-probabilities alone come from a product with a softmax in its epilogue",
    "anchored": "exponentials relative to the sampled token from the epilogue, no row kernel",
    "staged": "rows for losses over whole sequences: statistics, then the gradient, from the same logits",
    "recompute": "logits twice, 8 NHV, for idle tokens too: what TRL, Liger and verl cannot go below",
    "eager": "all logits at once and autograd, each pass reading and writing once",
}
PARTS = ("logits", "epilogue", "row passes", "dhidden", "dweight", "finish")

# Of the folded products (kernels/matmul.py): hidden states that stay in the L2 cache while the weight is read once.
GROUP_BYTES = 16 << 20
# Per logit, beside the product and not overlapped with it: the estimate of kernels/anchored.py.
EPILOGUE_INSTRUCTIONS = 20
# Launches of a call, and of them those before the first product, when the device waits for the host. Counted with
# torch.profiler over calls of one and of four chunks, views left out, rounded.
LAUNCHES = {"step": (70, 50), "frozen": (70, 50), "forward": (20, 15)}
LAUNCHES_PER_CHUNK, LAUNCHES_PER_ROW_CHUNK = 5, 5
EAGER_LAUNCHES, FLOOR_LAUNCHES = 60, 3


class Part(NamedTuple):
    """`flops` of matrix products, `bytes` to and from memory; seconds of computing and of moving, each alone."""

    name: str
    flops: int
    bytes: int
    computing: float
    moving: float

    @property
    def seconds(self) -> float:
        return max(self.computing, self.moving)


@dataclass(frozen=True)
class Prediction:
    """What one call costs."""

    parts: tuple[Part, ...]
    waiting: float  # seconds of the device, until the host has launched the first product
    issuing: float  # seconds of the host for all other launches, hidden where the device takes longer
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
        return self.waiting + max(self.issuing, sum(part.seconds for part in self.parts))

    @property
    def seconds_apart(self) -> float:
        return self.waiting + max(self.issuing, sum(part.computing + part.moving for part in self.parts))


def ways(case: Case, device: Device) -> tuple[str, ...]:
    """The names in WAYS that serve a case on a device."""
    folds = device.type == "cuda" and case.torch_dtype.itemsize == 2
    serves = {
        "unscored": case.mode != "forward",
        "linear": folds,
        "anchored": folds and case.dtype != "float16",  # which cannot hold e^(z - z_id)
        "staged": case.mode != "forward",
    }
    return tuple(way for way in WAYS if serves.get(way, True))


def way_of(implementation: str) -> str | None:
    """The way of an implementation of the benchmarks, by its name; None where there is no model of it."""
    name, _, rest = implementation.partition("-")
    if name == "ours":
        last = rest.rpartition("-")[2]
        return last if last in WAYS else "rows"
    peers = dict.fromkeys(("trl", "liger", "verl", "cut"), "recompute")
    return peers.get(name, name if name in ("floor", "eager") else None)


def predict(case: Case, device: Device, way: str = "rows") -> Prediction:
    """What `way` should cost. ValueError where it does not serve the case."""
    served = ways(case, device)
    if way not in served:
        raise ValueError(f"{way!r} does not serve {case} on {device.name}; expected one of {', '.join(served)}")
    return {"floor": _floor, "eager": _eager}.get(way, _chunked)(_Work(case, device, way))


def predictions(case: Case, device: torch.device) -> dict[str, Any]:
    """For the JSON of a run: {"device", "source", "ways": way -> seconds, seconds_apart, flops, bytes, peak_bytes}."""
    rates = find_device(str(device), case)
    fields = ("seconds", "seconds_apart", "flops", "bytes", "peak_bytes")
    found = {way: predict(case, rates, way) for way in ways(case, rates)}
    table = {way: {field: getattr(prediction, field) for field in fields} for way, prediction in found.items()}
    return {"device": rates.name, "source": rates.source, "ways": table}


# --- the work of a case ---------------------------------------------------------------------------------------------


def idle_tokens(case: Case) -> int:
    """Tokens that cannot have a gradient: those of prompts with equal rewards, where no KL term moves them."""
    if case.beta != 0:
        return 0
    per_prompt = case.length * case.generations
    share = 1.0 if case.generations == 1 else case.idle_share  # the reward of a single completion is its own mean
    return round(case.tokens // per_prompt * share) * per_prompt


class _Work:
    """A case in numbers. Of N tokens `active` get gradients, `scored` others their log-probabilities alone."""

    def __init__(self, case: Case, device: Device, way: str) -> None:
        self.case, self.device, self.way = case, device, way
        self.tokens, self.width, self.vocab = case.tokens, case.hidden_size, case.vocab_size
        self.weight = self.vocab * self.width  # elements
        idle = 0 if way in ("floor", "eager", "recompute") else idle_tokens(case)
        self.active = 0 if case.mode == "forward" else self.tokens - idle
        self.scored = 0 if way == "unscored" else self.tokens - self.active
        self.trained = case.mode == "step" and self.active > 0

        # Bytes of an element: of the inputs, of logits, of their gradient, of the sums that become dweight.
        kind, on_cpu = torch.device(device.type), device.type == "cpu"
        self.item = case.torch_dtype.itemsize
        logits_dtype = default_logits_dtype(case.torch_dtype, kind)
        self.logit = logits_dtype.itemsize
        self.gradient = self.logit if on_cpu else self.item
        budget = memory_budget(kind) if on_cpu else gpu_budget(device.memory if math.isfinite(device.memory) else 0)
        grad_dtype = logits_dtype if on_cpu else case.torch_dtype
        sizes = chunk_sizes(self.tokens, self.vocab, logits_dtype, grad_dtype, kind, budget=budget)
        staged = way == "staged"
        self.rows = sizes.sequences if staged else sizes.products
        self.logits_rows = self.rows if staged else sizes.logits
        few = ROUNDED_CHUNKS if on_cpu else 1  # chunks whose sum is rounded as it is
        self.sum = self.gradient if self.tokens <= few * self.rows else 4
        returned = {"step": self.operands(self.tokens, 1), "frozen": self.operands(self.tokens, 0), "forward": 0}
        self.returned = returned[case.mode]

    def chunks(self, tokens: int) -> int:
        """Product chunks."""
        return -(-tokens // self.rows)

    def row_chunks(self, tokens: int) -> int:
        return self.chunks(tokens) * -(-self.longest(tokens) // self.logits_rows) if tokens else 0

    def longest(self, tokens: int) -> int:
        """Rows of a product chunk: as few product chunks as can be, of the same length."""
        return -(-tokens // max(1, self.chunks(tokens)))

    def operands(self, tokens: int, weight_reads: int) -> int:
        """Bytes of hidden states (or dhidden), once, and of the weight."""
        return (tokens * self.width + weight_reads * self.weight) * self.item

    def part(self, name: str, tokens: int = 0, bytes: int = 0, instructions: int = 0) -> Part:
        """`tokens`: those that go through a product over H and V."""
        flops, rates = 2 * tokens * self.weight, self.device.flops
        computing = flops / rates[self.case.dtype]
        if instructions:  # a multiply-add is one of them, and two FLOP of a product without tensor cores
            computing += instructions / (rates["float32"] / 2)
        return Part(name, flops, bytes, computing, bytes / self.device.bandwidth)

    def prediction(self, parts: list[Part], peak: int, launches: int, before: int = 0) -> Prediction:
        launch = self.device.launch
        given = self.operands(self.tokens, 1) + self.returned
        return Prediction(tuple(parts), before * launch, (launches - before) * launch, peak, given)


class _Sweep(NamedTuple):
    """A pass over `tokens`: its product writes `written` bytes per logit, its row kernels read and write `moved`."""

    tokens: int
    written: int
    moved: int
    folded: bool = False


def _sweeps(w: _Work) -> list[_Sweep]:
    gradients = _Sweep(w.active, w.logit, w.logit + w.gradient)
    scores = _Sweep(w.scored, w.logit, w.logit)
    if w.way == "anchored":
        gradients = _Sweep(w.active, w.gradient, 0, folded=True)
    if w.way == "staged":
        gradients = _Sweep(w.active, w.logit, 2 * w.logit + w.gradient)
    if w.way in ("anchored", "linear"):
        scores = _Sweep(w.scored, 0, 0, folded=True)
    if w.way == "recompute":
        scores = _Sweep(w.tokens, w.logit, w.logit)
    return [sweep for sweep in (gradients, scores) if sweep.tokens]


def _chunked(w: _Work) -> Prediction:
    """The ways through the engine."""
    sweeps = _sweeps(w)
    groups = -(-min(w.rows, w.tokens) * w.width * w.item // GROUP_BYTES)  # of a chunk, in a folded product
    reads = sum(w.chunks(s.tokens) * groups if s.folded else w.row_chunks(s.tokens) for s in sweeps)
    tokens = sum(s.tokens for s in sweeps)
    folded = sum(s.tokens for s in sweeps if s.folded)
    parts = [
        w.part("logits", tokens, w.operands(tokens, reads) + w.vocab * sum(s.tokens * s.written for s in sweeps)),
        w.part("epilogue", instructions=folded * w.vocab * EPILOGUE_INSTRUCTIONS),
        w.part("row passes", bytes=w.vocab * sum(s.tokens * s.moved for s in sweeps)),
        *_gradients(w),
    ]
    longest = w.longest(w.tokens)
    peak = max((min(longest, w.rows if s.folded else w.logits_rows) * w.vocab * s.written for s in sweeps), default=0)
    if w.active and w.way != "anchored" and w.logits_rows < w.rows:
        peak += longest * w.vocab * w.gradient
    if w.way == "anchored" and w.active:  # a chunk of dhidden, its scaled copy in float32, and that rounded
        peak += longest * w.width * (4 + 2 * w.item)
    if w.trained:  # the scratch is free before the sums are cast
        cast = w.weight * w.item if w.sum != w.item else 0
        peak = max(peak, cast) + w.weight * (w.sum - w.item)
    launches, before = LAUNCHES[w.case.mode]
    for s in sweeps:
        chunks, row_chunks = w.chunks(s.tokens), w.chunks(s.tokens) if s.folded else w.row_chunks(s.tokens)
        launches += LAUNCHES_PER_CHUNK * chunks + LAUNCHES_PER_ROW_CHUNK * row_chunks
    return w.prediction(parts, peak, launches, before)


def _gradients(w: _Work) -> Iterator[Part]:
    chunks, dlogits, elements = w.chunks(w.active), w.active * w.vocab * w.gradient, w.active * w.width
    anchored, finish = w.way == "anchored", 0
    if w.active:
        yield w.part("dhidden", w.active, dlogits + w.operands(w.active, chunks))
        finish += elements * (8 + 4 * w.item) * anchored  # scaled in float32, rounded, put in place
    if w.trained:
        sums = (2 * chunks - 1) * w.weight * w.sum  # the first chunk writes them, the others read and write
        yield w.part("dweight", w.active, dlogits + w.operands(w.active, 0) + sums)
        finish += elements * (8 + 2 * w.item) * anchored  # the scaled hidden states
        finish += w.weight * (w.sum + w.item) * (w.sum != w.item)
    yield w.part("finish", bytes=finish)


def _eager(w: _Work) -> Prediction:
    """implementations/torch_.py: logits, float32 copy, log_softmax; backward in float32 as far as the first product."""
    logits, cast = w.tokens * w.vocab, w.item + 4 if w.item < 4 else 0  # bytes per logit
    moved, held = cast + 8, max(cast, 8)  # log_softmax has float32 in and out
    if w.active:
        moved, held = moved + 4 + 12 + cast, 12  # the gradient of its output; of its input, from that and its output
    rows = w.part("row passes", bytes=logits * moved)
    peak = max(held * logits - w.returned, logits * w.item)  # before the gradients are there, or with them
    return w.prediction([*_bare_products(w), rows], peak, EAGER_LAUNCHES)


def _floor(w: _Work) -> Prediction:
    return w.prediction(_bare_products(w), w.tokens * w.vocab * w.item, FLOOR_LAUNCHES)


def _bare_products(w: _Work) -> list[Part]:
    """Over all tokens at once, logits and their gradient in the type of the inputs."""
    names = {"step": ("logits", "dhidden", "dweight"), "frozen": ("logits", "dhidden"), "forward": ("logits",)}
    moved = w.tokens * w.vocab * w.item + w.operands(w.tokens, 1)
    return [w.part(name, w.tokens, moved) for name in names[w.case.mode]]
