"""The model of grpo_kernels/benchmarks/limits.py on paper, beside measurements, and for clusters. Prints Markdown.

    python bench/roofline.py                                          # heads of real models on an H200
    python bench/roofline.py --device cpu --shapes smollm2-135m:2048 --dtype float32 --mode forward
    python bench/roofline.py --results bench/results/x.json           # of `grpo-kernels bench`; on the device it names
    python bench/roofline.py --designs --device H100                  # chunks, as in limits.DESIGNS
    python bench/roofline.py --cluster --gpus 8 64 512 --tokens 1000000

In the tables every part takes the longer of its computing and its memory traffic, and what limits.py says cannot
overlap; "apart" is the total if nothing hid anything; memory is what a call holds beyond its inputs and the gradients
that it returns.

The cluster: nodes of 8 GPUs, data-parallel over nodes. In a node the vocabulary is split (every GPU sees all tokens of
the node and has V/8 rows of the lm_head; what a token needs from the others is its maximum, its sums and the sampled
logit) or the lm_head is replicated (every GPU has an eighth of the node's tokens). Gradients of the lm_head are summed
over nodes once per step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_kernels.benchmarks.cases import DTYPES, MODES, Case, make_case
from grpo_kernels.benchmarks.devices import DEVICES, Device, find_device
from grpo_kernels.benchmarks.document import Document, read
from grpo_kernels.benchmarks.gemm import EXPOSED_RANGE
from grpo_kernels.benchmarks.limits import DESIGNS, PARTS, WAYS, Prediction, default_design, predict, way_of, ways

DEFAULT = "H200"
SHAPES = ("llama-3-8b:16384", "qwen2.5-7b:16384", "qwen2.5-1.5b:16384", "gemma-2-2b:16384")

GPUS_PER_NODE = 8
NVLINK = 450e9  # bytes/s of a GPU in each direction: NVIDIA's number for NVLink 4
NETWORK = 50e9  # bytes/s of a GPU in each direction: one port of 400 Gbit/s each
COLLECTIVE = 20e-6  # seconds that a collective within a node takes at least; assumed
STATISTICS = 4 * 4  # bytes per token: maximum, sum of exponentials, its moment, sampled logit, in float32
ITEM = 2  # bytes of weights, hidden states and the gradients that are summed
LAYOUTS = ("split", "replicated")
MS, GB = 1e3, 1e-9


@dataclass(frozen=True)
class Head:
    """An lm_head (V, H), and the parameters of the model without it and without its embedding."""

    name: str
    hidden_size: int
    vocab_size: int
    body: float


# The bodies are the published parameter counts without two matrices (V, H).
HEADS = (
    Head("Llama-3-8B", 4096, 128256, 8.03e9 - 2 * 4096 * 128256),
    Head("Qwen2.5-7B", 3584, 152064, 7.62e9 - 2 * 3584 * 152064),
    Head("Llama-3-70B", 8192, 128256, 70.6e9 - 2 * 8192 * 128256),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.cluster:
        name = options.device or DEFAULT
        if name not in DEVICES:
            parser.error(f"--cluster is on paper: expected --device {', '.join(DEVICES)}")
        print(cluster(DEVICES[name], options.tokens, options.gpus))
        return
    if options.results:
        for found in (document := read(options.results))["cases"]:
            case = Case(**{name: value for name, value in found["case"].items() if name in Case.__dataclass_fields__})
            device = find_device(options.device or document["environment"]["device"], case)
            print(report(case, device, found["implementations"]), end="\n\n")
        return
    if options.designs:
        name = options.device or DEFAULT
        if name not in DEVICES:
            parser.error(f"--designs is on paper: expected --device {', '.join(DEVICES)}")
        print(designs([make_case(shape, options.dtype, mode=options.mode) for shape in options.shapes], DEVICES[name]))
        return
    for shape in options.shapes:
        case = make_case(
            shape,
            options.dtype,
            mode=options.mode,
            idle_share=options.idle_share,
            beta=options.beta,
            kept_ids=options.kept_ids,
        )
        print(report(case, find_device(options.device or DEFAULT, case)), end="\n\n")


# --- one device -----------------------------------------------------------------------------------------------------


def report(case: Case, device: Device, measured: Document | None = None) -> str:
    """A table of the ways to compute a case; and one of measurements, where `measured` has them by implementation."""
    found = {way: predict(case, device, way) for way in ways(case, device)}
    header = ("", "TFLOP", "GB", *PARTS, "total ms", "apart ms", "of floor", "memory GB")
    lines = [f"{case} on {device.name} ({device.source})", ""]
    lines.append(table(header, [_line(way, found[way], found["floor"], device) for way in found]))
    if measured is not None:
        lines += ["", _beside(case, found, measured)]
    return "\n".join(lines)


def designs(cases: Sequence[Case], device: Device) -> str:
    """A table: per case the time of each of DESIGNS in units of the floor's, over the range of gemm.EXPOSED_RANGE."""
    names = [f"{way}, {name}" for way in ("rows", "anchored") for name in DESIGNS]
    rows = []
    for case in cases:
        floor = predict(case, device, "floor").seconds
        cells = []
        for way in ("rows", "anchored"):
            if way not in ways(case, device):
                cells += [""] * len(DESIGNS)
                continue
            for design in DESIGNS.values():
                low, high = (predict(case, device, way, design, share) for share in EXPOSED_RANGE)
                times = _span([low.seconds / floor, high.seconds / floor], ".3f")
                cells.append(f"{times} F, {low.peak_bytes * GB:.1f} GB")
        shape = f"({case.tokens}, {case.hidden_size}, {case.vocab_size})"
        rows.append([f"{case.head} {shape}", f"{floor * MS:.1f}", *cells])
    return f"{device.name} ({device.source})\n\n" + table(("", "floor (F), ms", *names), rows)


def _line(way: str, prediction: Prediction, floor: Prediction, device: Device) -> list[str]:
    spent = dict.fromkeys(PARTS, 0.0) | {part.name: part.seconds for part in prediction.parts}
    fits = prediction.peak_bytes + prediction.given_bytes <= device.memory
    return [
        way,
        f"{prediction.flops / 1e12:.4g}",
        f"{prediction.bytes * GB:.4g}",
        *(f"{seconds * MS:.2f}" if seconds else "" for seconds in spent.values()),
        f"{prediction.seconds * MS:.1f}",
        f"{prediction.seconds_apart * MS:.1f}",
        f"{prediction.seconds / floor.seconds:.3f}",
        f"{prediction.peak_bytes * GB:.3f}" + ("" if fits else " (does not fit)"),
    ]


def _beside(case: Case, found: dict[str, Prediction], measured: Document) -> str:
    """Measured medians and peaks beside the predictions of their ways."""
    header = (
        "",
        "modelled as",
        "measured ms",
        "predicted ms",
        "apart ms",
        "measured/predicted",
        "measured GB",
        "predicted GB",
    )
    rows = []
    for name, results in measured.items():
        way = way_of(name, case.kept_ids) or ""
        prediction = found.get(way)
        if prediction is None or not results.keys() & {"seconds", "peak_bytes"}:
            continue
        times = [f"{prediction.seconds * MS:.1f}", f"{prediction.seconds_apart * MS:.1f}", ""]
        median = ""
        if "seconds" in results:
            median = f"{results['seconds']['median'] * MS:.1f}"
            times[-1] = f"{results['seconds']['median'] / prediction.seconds:.2f}"
        peak = f"{results['peak_bytes'] * GB:.3f}" if "peak_bytes" in results else ""
        rows.append([name, way, median, *times, peak, f"{prediction.peak_bytes * GB:.3f}"])
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, aligned for a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    cells = [header, ["-" * width for width in widths], *rows]
    padded = (
        [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))] for row in cells
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


# --- a cluster ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Seconds of a GPU for the lm_head's share of a training step, and the bytes that it holds for that."""

    head: Head
    gpus: int
    layout: str
    tokens: int  # of a node
    products: float
    rest: float  # row passes, waves that are not full and all else on the GPU itself
    nvlink: float
    exposed_nvlink: float
    network: float
    body: float  # backward of the rest of the model: 4 FLOP per parameter and token at the products' rate, or longer
    body_network: float  # sums of its gradients, on the same network meanwhile
    bytes: float

    @property
    def exposed_network(self) -> float:
        """What the lm_head adds to a network that sums the body's gradients behind the body's backward.

        The gradient of the lm_head is the first to be finished, before that backward begins.
        """
        return max(0.0, self.network + self.body_network - self.body) - max(0.0, self.body_network - self.body)

    @property
    def seconds(self) -> float:
        return self.products + self.rest + self.exposed_nvlink + self.exposed_network


def step(head: Head, device: Device, tokens: int, gpus: int, layout: str) -> Step:
    """`tokens` of the whole step. Sums over n GPUs or nodes are ring all-reduces: 2 (n - 1) / n of the bytes."""
    nodes, split = gpus // GPUS_PER_NODE, layout == "split"
    of_node = -(-tokens // nodes)
    own, vocab = of_node, head.vocab_size // GPUS_PER_NODE
    if not split:
        own, vocab = -(-of_node // GPUS_PER_NODE), head.vocab_size
    case = Case(head.name, own, head.hidden_size, vocab, "bfloat16", length=1, generations=1)
    prediction = predict(case, device, "staged" if split else "rows")
    products = sum(part.computing for part in prediction.parts if part.flops)
    weight = vocab * head.hidden_size * ITEM

    in_node, over_nodes = (2 * (n - 1) / n for n in (GPUS_PER_NODE, nodes))
    body = 4 * head.body * of_node / GPUS_PER_NODE / device.flops[case.dtype]
    if split:
        chunks = -(-own // default_design(case, device, "staged").row_chunk)
        # The row kernel waits for the statistics of its chunk. The sum of dhidden goes on behind the next chunk; with
        # sequence parallelism hidden states are gathered and dhidden scattered instead, as many bytes.
        statistics = chunks * COLLECTIVE + in_node * own * STATISTICS / NVLINK
        dhidden = chunks * COLLECTIVE + in_node * own * head.hidden_size * ITEM / NVLINK
        nvlink, exposed = statistics + dhidden, statistics + dhidden / chunks
    else:  # dweight is scattered, summed over nodes and gathered behind the body's backward
        nvlink = 2 * COLLECTIVE + in_node * weight / NVLINK
        exposed = max(0.0, nvlink - body)
    return Step(
        *(head, gpus, layout, of_node, products, prediction.seconds - products, nvlink, exposed),
        network=over_nodes * head.vocab_size * head.hidden_size * ITEM / GPUS_PER_NODE / NETWORK,
        body=body,
        body_network=over_nodes * head.body * ITEM / GPUS_PER_NODE / NETWORK,
        bytes=2 * weight + prediction.peak_bytes,
    )


def cluster(device: Device, tokens: int, gpus: Sequence[int]) -> str:
    """The table, and what follows from it."""
    steps = [step(head, device, tokens, n, layout) for head in HEADS for n in gpus for layout in LAYOUTS]
    header = (
        *("lm_head", "GPUs", "in a node", "tokens/node", "products", "rest", "NVLink", "exposed", "network", "exposed"),
        *("total ms", "body's backward", "its network", "GB per GPU"),
    )
    rows = []
    for s in steps:
        times = (s.products, s.rest, s.nvlink, s.exposed_nvlink, s.network, s.exposed_network, s.seconds)
        cells = (f"{seconds * MS:.2f}" for seconds in (*times, s.body, s.body_network))
        rows.append([s.head.name, str(s.gpus), s.layout, f"{s.tokens:,}", *cells, f"{s.bytes * GB:.2f}"])
    title = f"{tokens:,} tokens per step, bfloat16, {device.name} ({device.source}); milliseconds per GPU and step"
    return "\n".join([title, "", table(header, rows), "", *(f"- {line}" for line in _conclusions(steps, device))])


def _conclusions(steps: Sequence[Step], device: Device) -> Iterator[str]:
    for gpus in dict.fromkeys(s.gpus for s in steps):
        here = [s for s in steps if s.gpus == gpus]
        split = [s for s in here if s.layout == "split"]
        shares = {
            "products": [s.products / s.seconds for s in split],
            "row passes, idle waves and the like": [s.rest / s.seconds for s in split],
            "NVLink": [s.exposed_nvlink / s.seconds for s in split],
            "the network": [s.exposed_network / s.seconds for s in split],
        }
        gone = ", ".join(f"{_span(values, '.0%')} {name}" for name, values in shares.items())
        slower = [r.seconds / s.seconds for s, r in zip(split, (s for s in here if s not in split), strict=True)]
        yield f"{gpus} GPUs, split: {gone}. Replicated takes {_span(slower, '.2f')} of that time."
    flops = device.flops["bfloat16"]  # per second; 6 FLOP of products and 2 * ITEM bytes of sums for an element
    yield (
        f"Below {2 * ITEM * flops / (6 * NETWORK):,.0f} tokens per node the sum of the lm_head's gradient over many "
        "nodes takes longer than its products, whatever the head."
    )
    hidden = [ITEM * flops / (2 * NETWORK) * (1 + h.hidden_size * h.vocab_size / h.body) for h in HEADS]
    yield (
        f"From {_span(hidden, ',.0f')} tokens per node on, the body's backward hides it, the sums of the body's own "
        "gradients going first."
    )
    ratio = [r.bytes / s.bytes for s, r in zip(steps[::2], steps[1::2], strict=True)]
    yield f"Replicated holds {_span(ratio, '.1f')} times as much for weight, gradients and scratch."


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="ways: " + "; ".join(f"{name} = {text}" for name, text in WAYS.items()),
    )
    parser.add_argument(
        "--device", help=f"{', '.join(DEVICES)}; cpu or cuda: measured here; default: {DEFAULT}, or the results'"
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="HEAD:TOKENS or TOKENSxHIDDENxVOCAB")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--mode", choices=MODES, default="step")
    parser.add_argument("--idle-share", type=float, default=0.0, help="of the prompts, with --beta 0")
    parser.add_argument("--kept-ids", type=int, default=0, help="of a sampling mask, per token; default: no mask")
    parser.add_argument("--beta", type=float, default=0.04)
    parser.add_argument(
        "--results", type=Path, help="JSON of `grpo-kernels bench`: its cases, measured beside predicted"
    )
    parser.add_argument("--designs", action="store_true", help="chunks of rows and of products, on paper")
    parser.add_argument("--cluster", action="store_true", help="many nodes, on paper")
    parser.add_argument("--gpus", type=_whole_nodes, nargs="+", default=(8, 64, 512, 4096), help="of the cluster")
    parser.add_argument("--tokens", type=int, default=10**6, help="of a step of the cluster")
    return parser


def _whole_nodes(text: str) -> int:
    gpus = int(text)
    if gpus < 1 or gpus % GPUS_PER_NODE:
        raise argparse.ArgumentTypeError(f"{text}: expected a multiple of {GPUS_PER_NODE}")
    return gpus


if __name__ == "__main__":
    main()
