"""The sets of measurements that have a name, most valuable first: what `--set` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from .cases import Case, make_case, token_counts
from .implementations import select

PLAIN = ("ours", "eager")
BARE = (*PLAIN, "floor")
RIVALS = (*BARE, "compiled", "trl", "liger", "liger-native", "verl*", "cut-cross-entropy", "quack")
NEAREST = (*BARE, "compiled", "trl", "liger")
EVERYBODY = ("ours*", *RIVALS)
PEERS = (*BARE, "trl", "liger", "liger-native", "verl", "quack")
IDLE = ("ours", "ours-unscored", "floor")
MASKED = ("ours", "ours-unmasked", "floor")


@dataclass(frozen=True)
class Job:
    """A case, and the implementations measured in it: patterns of `select`, less those of `without`.

    `weighed`: patterns of those whose memory a CPU measures too, which takes a process each; a GPU weighs everybody who
    is timed. `tuned`: of every implementation the fastest setting; else the one that it documents.
    """

    case: Case
    against: tuple[str, ...]
    timed: bool = True
    weighed: tuple[str, ...] = ()
    tuned: bool = True
    without: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return [name for name in select(self.against) if not any(fnmatch(name, pattern) for pattern in self.without)]

    def weighed_names(self) -> list[str]:
        return [name for name in self.names() if any(fnmatch(name, pattern) for pattern in self.weighed)]


def jobs(name: str, device_type: str) -> list[Job]:
    """The jobs of a set for "cpu" or "cuda"; a GPU has room for larger ones. A case that comes again is left out."""
    found: dict[Case, Job] = {}
    for job in SETS[name](device_type == "cpu"):
        found.setdefault(job.case, job)
    return list(found.values())


def _quick(small: bool) -> list[Job]:
    if small:
        return [
            *_job("smollm2-135m:512", RIVALS, weighed=BARE),
            *_job("smollm2-135m:512", (*BARE, "trl"), mode="forward"),
            *_job("smollm2-135m:512", (*BARE, "trl"), dtypes=("float32",)),
        ]
    return [
        *_job("qwen2.5-1.5b:8192", RIVALS),
        *_job("qwen2.5-1.5b:8192", RIVALS, mode="forward"),
        *_job("llama-3-8b:4096", RIVALS),
    ]


def _targets(small: bool) -> list[Job]:
    """What bench/bars.py asks for, and no more: on a GPU that is lent for minutes, a head with tuned peers first."""
    if small:
        return [*_heads(small), *_idle(small), *_masks(small)]
    idle: dict[str, Any] = {"beta": 0.0, "length": 512}
    long = "65536x3584x151936"
    return [
        *_job("llama-3-8b:16384", RIVALS, tuned=True),
        *(job for head in ("qwen2.5-7b", "qwen2.5-1.5b", "gemma-2-2b") for job in _job(f"{head}:16384", PEERS)),
        *_job("llama-3-8b:16384", (*BARE, "ours-*-linear", "trl"), mode="forward"),
        *_job("qwen2.5-7b:16384", (*BARE, "trl"), mode="frozen"),
        *(job for mode in ("step", "frozen") for job in _job(long, (*BARE, "trl"), mode=mode)),
        *(job for share in (0.5, 0.0) for job in _job("qwen2.5-1.5b:16384", IDLE, idle_share=share, **idle)),
        *(job for count in (128, 256, 512, 1024) for job in _job(f"qwen2.5-1.5b:{count}", BARE, length=count // 4)),
        *_job("llama-3-8b:16384", MASKED, kept_ids=32),
    ]


def _heads(small: bool) -> list[Job]:
    """The heads of real models: forward and backward, what it takes in memory; on a GPU also the other modes."""
    if small:
        both = ("float32", "bfloat16")
        return [
            *_job("smollm2-135m:2048", RIVALS, dtypes=both, weighed=(*BARE, "trl"), tuned=True, length=256),
            *_job("qwen2.5-0.5b:1024", NEAREST, dtypes=both, weighed=BARE, tuned=True, length=256),
            *_job("qwen2.5-0.5b:4096", PLAIN, timed=False, weighed=PLAIN, length=256),
            *_job("llama-3.2-1b:512", NEAREST, dtypes=both, tuned=True, length=128),
        ]
    return [
        *_job("llama-3-8b:16384", EVERYBODY, tuned=True),
        *_job("qwen2.5-7b:16384", RIVALS, tuned=True),
        *_job("qwen2.5-1.5b:16384", EVERYBODY, tuned=True),
        *_job("gemma-2-2b:16384", RIVALS, tuned=True),
        *_job("llama-3-8b:16384", EVERYBODY, tuned=True, mode="forward"),
        *_job("qwen2.5-7b:16384", RIVALS, tuned=True, mode="frozen"),
        *_job("65536x3584x151936", RIVALS, tuned=True),
        *_job("65536x3584x151936", RIVALS, tuned=True, mode="frozen"),
        *_job("qwen2.5-1.5b:16384", EVERYBODY, tuned=True, mode="forward"),
        *_job("qwen2.5-0.5b:16384", RIVALS, tuned=True),
        *_job("smollm2-135m:16384", RIVALS, tuned=True),
        *_job("qwen2.5-1.5b:16384", RIVALS, tuned=True, dtypes=("float16",)),
        *_job("smollm2-135m:16384", RIVALS, tuned=True, dtypes=("float32",)),
    ]


def _idle(small: bool) -> list[Job]:
    """Time against the share of prompts whose rewards are all equal; without KL they have no gradient."""
    shape, length = ("smollm2-135m:1024", 64) if small else ("qwen2.5-1.5b:16384", 512)
    against = (*IDLE, "eager", "trl", "liger")
    shares = (0.0, 0.5, 0.25, 0.75) if small else (0.0, 0.5, 0.25, 0.75, 1.0)
    found = [job for share in shares for job in _job(shape, against, idle_share=share, beta=0.0, length=length)]
    if small:
        options: dict[str, Any] = {"dtypes": ("float32",), "beta": 0.0, "length": length}
        found += [job for share in shares[:2] for job in _job(shape, IDLE, idle_share=share, **options)]
    return found


def _tokens(small: bool) -> list[Job]:
    """Few tokens, where launches cost more than products, to many."""
    head, most = ("smollm2-135m", 2048) if small else ("qwen2.5-1.5b", 65536)
    return [
        job for count in token_counts(most) for job in _job(f"{head}:{count}", NEAREST, length=min(count // 4, 512))
    ]


def _memory(small: bool) -> list[Job]:
    """Peak memory against the length of 8 completions."""
    head, lengths = (
        ("qwen2.5-0.5b", (128, 256, 512, 1024, 2048)) if small else ("qwen2.5-7b", (512, 1024, 2048, 4096, 8192))
    )
    against = (*PLAIN, "trl", "liger", *(() if small else ("floor", "verl", "verl-torch")))
    options: dict[str, Any] = {"timed": not small, "weighed": against}
    return [job for length in lengths for job in _job(f"{head}:{8 * length}", against, length=length, **options)]


def _scaling(small: bool) -> list[Job]:
    """One size at a time: vocabulary V, hidden size H, completions per prompt G."""
    against = (*BARE, "trl")
    tokens, hidden, vocab = (512, 576, 49152) if small else (8192, 2048, 131072)
    vocabs = (8192, 32768, 131072) if small else (32768, 65536, 262144)
    widths = (256, 1024, 2048) if small else (1024, 4096, 8192)
    groups = (2, 8, 32) if small else (2, 16, 64)
    return [
        *(job for v in vocabs for job in _job(f"{tokens}x{hidden}x{v}", against)),
        *(job for h in widths for job in _job(f"{tokens}x{h}x{vocab}", against)),
        *(job for g in groups for job in _job(f"{tokens}x{hidden}x{vocab}", against, generations=g, length=8)),
    ]


def _masks(small: bool) -> list[Job]:
    """Sampling masks: time against the kept ids of a token and against H, half of the tokens masked, scoring alone."""
    shape, length = ("smollm2-135m:2048", 256) if small else ("llama-3-8b:16384", None)
    dtypes = ("float32", "bfloat16") if small else ("bfloat16",)
    tokens, vocab, widths = (1024, 49152, (256, 1024, 2048)) if small else (8192, 131072, (1024, 4096, 8192))

    def of(kept: int, shape: str = shape, weighed: Sequence[str] = (), **options: Any) -> list[Job]:
        return _job(shape, MASKED, dtypes=dtypes, weighed=weighed, kept_ids=kept, length=length, **options)

    return [
        *(job for kept in (32, 8, 512) for job in of(kept, weighed=MASKED[:2])),
        *of(32, masked_share=0.5),
        *of(32, mode="forward"),
        *(job for kept in (128, 16, 64, 256) for job in of(kept)),
        *(job for width in widths for job in of(32, f"{tokens}x{width}x{vocab}")),
    ]


def _sweeps(small: bool) -> list[Job]:
    return [*_idle(small), *_tokens(small), *_scaling(small), *_memory(small)]


def _all(small: bool) -> list[Job]:
    return [*_targets(small), *_heads(small), *_sweeps(small), *_masks(small)]


SETS: dict[str, Callable[[bool], list[Job]]] = {
    "quick": _quick,
    "targets": _targets,
    "heads": _heads,
    "idle": _idle,
    "memory": _memory,
    "tokens": _tokens,
    "scaling": _scaling,
    "masks": _masks,
    "sweeps": _sweeps,
    "all": _all,
}


def _job(
    shape: str,
    against: Sequence[str],
    *,
    dtypes: Sequence[str] = ("bfloat16",),
    timed: bool = True,
    weighed: Sequence[str] = (),
    tuned: bool = False,
    **options: Any,
) -> list[Job]:
    """One per type."""
    return [Job(make_case(shape, dtype, **options), tuple(against), timed, tuple(weighed), tuned) for dtype in dtypes]
