"""The data of the benchmarks: heads of real models, cases, and named sets of cases."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

LENGTH = 1024  # tokens per completion, where the batch is large enough
GENERATIONS = 4  # completions per prompt, unless a case says otherwise
DIVERGENCES = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}  # the beta of TRL and Liger
MODES = {
    "step": "loss, forward and backward, lm_head trained",
    "frozen": "loss, forward and backward, lm_head frozen",
    "forward": "log-probabilities of the sampled ids under no_grad",
    **dict.fromkeys(DIVERGENCES, "divergence to a teacher's distribution, forward and backward, lm_head trained"),
}
MODEL_MODES = {  # modes of a whole model with this head
    "trainer": "a micro-batch of TRL's trainer: forward, loss and backward",
    "sampling": "completions of eight to a prompt, none of which ends early",
    "train": "a step of grpo-kernels train: sampling and an update",
}
DTYPES = ("float32", "bfloat16", "float16")
HEADS = {  # (H, V) of the lm_head
    "smollm2-135m": (576, 49152),
    "qwen2.5-0.5b": (896, 151936),
    "llama-3.2-1b": (2048, 128256),
    "qwen2.5-1.5b": (1536, 151936),
    "gemma-2-2b": (2304, 256000),
    "qwen2.5-7b": (3584, 152064),
    "llama-3-8b": (4096, 128256),
    "qwen3.5": (2048, 248320),
    "gemma-3": (2560, 262144),
    "deepseek-v3": (7168, 129280),
    "tiny": (64, 2048),  # no model's: for trying the benchmarks themselves
}


@dataclass(frozen=True)
class Case:
    """What is measured: N = `tokens` in completions of `length` T, `generations` adjacent ones for each prompt.

    `idle_share` of the prompts have equal rewards, hence advantages of 0. `beta` is the weight of the k3 term.
    `masked_share` of the completions have a sampling mask, of `kept_ids` ids for each token; if `skewed`, `kept_ids` is
    the mean of `skewed_counts`. With `kept_ids` 0 there is no mask.

    With `temperature`, hidden states, weight and ids are those of SmolLM2-135M-Instruct, sampled at this temperature.
    With `entropy`, ids are sampled from a random policy of this mean entropy, in nats. With neither, ids are uniform
    and the policy's entropy is within 2 nats of log V.
    """

    head: str
    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    length: int
    mode: str = "step"
    generations: int = GENERATIONS
    idle_share: float = 0.0
    beta: float = 0.04
    kept_ids: int = 0
    masked_share: float = 1.0
    skewed: bool = False
    entropy: float = 0.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if min(self.tokens, self.hidden_size, self.vocab_size, self.length, self.generations) < 1:
            raise ValueError(f"{self}: sizes have to be positive")
        if self.tokens % (self.generations * self.length):
            raise ValueError(
                f"tokens={self.tokens}; expected a multiple of generations * length = {self.generations * self.length}"
            )
        if self.temperature and (self.hidden_size, self.vocab_size) != HEADS["smollm2-135m"]:
            raise ValueError(f"temperature={self.temperature:g} with {self.head}; samples are of smollm2-135m")

    def __str__(self) -> str:
        parts = [f"{self.head} ({self.tokens}, {self.hidden_size}, {self.vocab_size})", self.dtype, self.mode]
        if self.generations != GENERATIONS:
            parts.append(f"{self.generations} completions per prompt")
        if self.idle_share or not self.beta:
            parts.append(f"{self.idle_share:.0%} of the prompts without gradient, beta {self.beta:g}")
        if self.kept_ids:
            share = "" if self.masked_share == 1.0 else f" of {self.masked_share:.0%} of the tokens"
            parts.append(f"{self.kept_ids} ids kept{' on average' * self.skewed}{share}")
        if self.entropy:
            parts.append(f"samples of {self.entropy:g} nats")
        if self.temperature:
            parts.append(f"samples at T {self.temperature:g}")
        return ", ".join(parts)


def make_case(shape: str, dtype: str = "bfloat16", *, length: int | None = None, **options: Any) -> Case:
    """Returns a case of a shape, as `parse_shape` reads it; completions have up to LENGTH tokens by default."""
    head, tokens, hidden_size, vocab_size = parse_shape(shape)
    generations = options.get("generations", GENERATIONS)
    length = length or max(1, min(LENGTH, tokens // generations))
    return Case(head, tokens, hidden_size, vocab_size, dtype, length, **options)


def parse_shape(text: str) -> tuple[str, int, int, int]:
    """Returns (head, N, H, V) of "qwen2.5-7b:16384", with a head of HEADS, or "16384x3584x152064"; else ValueError."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match:
        tokens, hidden_size, vocab_size = map(int, match.groups())
        names = {sizes: name for name, sizes in HEADS.items()}
        return names.get((hidden_size, vocab_size), "custom"), tokens, hidden_size, vocab_size
    head, _, tokens_text = text.partition(":")
    if head not in HEADS or not tokens_text.isdigit():
        raise ValueError(f"{text!r}; expected HEAD:TOKENS with a head of {', '.join(HEADS)}, or TOKENSxHIDDENxVOCAB")
    return head, int(tokens_text), *HEADS[head]


# --- sets -------------------------------------------------------------------------------------------------------------

PLAIN = ("ours", "eager")
BARE = (*PLAIN, "floor")
RIVALS = (
    *BARE, "compiled", "torch*", "trl", "liger", "liger-native", "verl*", "cut-cross-entropy", "quack"
)  # fmt: skip
NEAREST = (*BARE, "compiled", "torch*", "trl", "liger")
TEACHERS = (*BARE, "compiled", "trl", "liger")
MANY_TEACHERS = ("ours", "ours-10-teachers")
PEERS = (*BARE, "torch*", "trl", "liger", "liger-native", "verl", "quack")
FASTEST = ("ours", "floor", "trl", "liger-native", "torch", "torch-chunked", "quack")
HEADLINE = ("ours", "ours-cuda", "ours-triton", "ours-sparse", "ours-rows-*", "ours-dweight-*", "floor")
IDLE = ("ours", "ours-unscored", "floor")
MASKED = ("ours", "ours-unmasked", "floor")
SPARSE = ("ours", "ours-2^-*", "floor")
CHUNKED = ("ours-float32-*", "eager")
PRECISE = ("ours-1-chunks", "ours-8-chunks", "ours-float32", "eager", "torch-chunked", "trl")
SEVERAL_IDS = ("ours", "ours-teacher*", "ours-logps", "ours-several")
SEARCHES = ("ours", "ours-several", "ours-top", "ours-min_p*", "ours-top_*")
COMMON = (*PLAIN, "trl", "liger")
WHOLES = {"trainer": ("trl-trainer", "ours-patch_trl", "ours-trainer"), "train": ("ours-train",)}
WHOLES["sampling"] = "ours-sampling", "ours-graphs", "vllm"
BOTH = ("float32", "bfloat16")


@dataclass(frozen=True)
class Job:
    """A case, and the implementations measured in it: patterns as `select` of table.py takes them.

    memory: patterns of those whose memory is measured on a CPU; on a GPU that of every timed implementation is. rounds:
    of timing; 0 measures memory only, None takes the command's number.
    """

    case: Case
    against: tuple[str, ...]
    memory: tuple[str, ...] = ()
    rounds: int | None = None


def jobs(name: str, device_type: str) -> list[Job]:
    """Returns the jobs of a set for "cpu" or "cuda", most valuable first, and each case once."""
    unique_jobs: dict[Case, Job] = {}
    for job in SETS[name][device_type]:
        unique_jobs.setdefault(job.case, job)
    return list(unique_jobs.values())


def _jobs(shape: Any, against: tuple[str, ...], memory: Any = (), rounds: Any = None, **fields: Any) -> list[Job]:
    """Returns a job, or one for each combination where the shape or a field of the case is a tuple of values."""
    choices = [value if isinstance(value, tuple) else (value,) for value in (shape, *fields.values())]
    combinations = [dict(zip(("shape", *fields), values, strict=True)) for values in itertools.product(*choices)]
    return [Job(make_case(**point), against, memory, rounds) for point in combinations]


def _counts(head: str, most: int) -> tuple[str, ...]:
    """Returns shapes of a head with 128, 256, 512, ... tokens, up to `most`."""
    return tuple(f"{head}:{2**power}" for power in range(7, most.bit_length()))


def _lengths(head: str, lengths: tuple[int, ...], against: tuple[str, ...], **options: Any) -> list[Job]:
    """Returns jobs of 8 completions, one for each length."""
    return [job for length in lengths for job in _jobs(f"{head}:{8 * length}", against, length=length, **options)]


def _whole(mode: str, shape: Any, length: int, **options: Any) -> list[Job]:
    """Returns jobs of a whole model, with 8 completions per prompt."""
    return _jobs(shape, WHOLES[mode], mode=mode, length=length, generations=8, **options)


_GPU_HEADS = tuple(f"{head}:16384" for head in ("llama-3-8b", "qwen2.5-7b", "qwen2.5-1.5b", "gemma-2-2b"))
_SHARES = (0.0, 0.5, 0.25, 0.75)
SETS: dict[str, dict[str, list[Job]]] = {
    "quick": {
        "cpu": [
            # Cheap cases first: bfloat16 products take minutes on CPUs without instructions for them.
            *_jobs("smollm2-135m:256", (*BARE, "trl"), dtype="float32"),
            *_jobs("smollm2-135m:256", (*BARE, "trl"), mode="forward"),
            *_jobs("smollm2-135m:256", RIVALS, memory=BARE),
        ],
        "cuda": [*_jobs("qwen2.5-1.5b:8192", RIVALS, mode=("step", "forward")), *_jobs("llama-3-8b:4096", RIVALS)],
    },
    # Heads of real models: time and memory of forward and backward; on a GPU also the other modes.
    "heads": {
        "cpu": [
            *_jobs("smollm2-135m:2048", RIVALS, dtype=BOTH, memory=(*BARE, "trl"), length=256),
            *_jobs("qwen2.5-0.5b:512", NEAREST, dtype=BOTH, memory=BARE, length=128),
            *_jobs("qwen2.5-0.5b:4096", PLAIN, rounds=0, memory=PLAIN, length=256),
            *_jobs("llama-3.2-1b:256", NEAREST, dtype=BOTH, length=64),
            *_jobs(("qwen3.5:128", "gemma-3:128", "deepseek-v3:128"), NEAREST),
        ],
        # Peers first, in case time runs out. Compiled eager, which compiles for half a minute, is in few cases.
        "cuda": [
            *_jobs(_GPU_HEADS[0], (*PEERS, "verl-torch", "cut-cross-entropy", "ours-sparse")),
            *_jobs("llama-3-8b:16384", (*BARE, "ours-cuda", "ours-triton", "trl"), mode="forward"),
            *_jobs(_GPU_HEADS[1:], PEERS),
            *_jobs(("qwen3.5:16384", "gemma-3:16384", "deepseek-v3:16384"), NEAREST),
            *_jobs("qwen2.5-7b:16384", (*BARE, "trl"), mode="frozen"),
            *_jobs("llama-3-8b:16384", MASKED, kept_ids=32),
            *_jobs("65536x3584x151936", (*BARE, "trl"), mode=("step", "frozen")),
            *_jobs("qwen2.5-1.5b:16384", IDLE, idle_share=(0.5, 0.0), beta=0.0, length=512),
            *_jobs(_counts("qwen2.5-1.5b", 1024), BARE),
        ],
    },
    # Every backend of this library, other chunks and another sum over them, and the three bare products.
    "headline": {
        "cpu": _jobs("smollm2-135m:2048", ("ours", "ours-cpu", "ours-torch", "floor"), dtype=BOTH, length=256),
        "cuda": _jobs(_GPU_HEADS, HEADLINE),
    },
    # Peers that may come near ours on a GPU; the set heads has all of them.
    "peers": {
        "cpu": _jobs("smollm2-135m:2048", FASTEST, length=256),
        "cuda": _jobs(_GPU_HEADS, FASTEST),
    },
    # Time of the host: the products take next to none.
    "host": {
        kind: [
            *_jobs("64x16x64", PLAIN, dtype="float32", length=8, beta=(0.0, 0.04), rounds=200),
            *_jobs("64x16x64", PLAIN, dtype="float32", length=8, mode="forward", rounds=200),
        ]
        for kind in ("cpu", "cuda")
    },
    # Time by number of kept ids: as many as a peer's engine kept, and equally many for each token; a mask for half of
    # the tokens; scoring only.
    "masks": {
        kind: [
            *_jobs(shape, MASKED, memory=MASKED[:2], kept_ids=8, skewed=True, **options),
            *_jobs(shape, MASKED, memory=MASKED[:2], kept_ids=(32, 8, 512), **options),
            *_jobs(shape, MASKED, kept_ids=32, masked_share=0.5, **options),
            *_jobs(shape, MASKED, kept_ids=32, mode="forward", **options),
        ]
        for kind, shape, options in (
            ("cpu", "smollm2-135m:2048", dict(dtype=BOTH, length=256)),
            ("cuda", "llama-3-8b:16384", {}),
        )
    },
    # Time by share of prompts whose rewards are all equal, which have no gradient without KL; time by number of tokens,
    # from few, where launches cost more than products, to many; peak memory by length of 8 completions.
    "sweeps": {
        "cpu": [
            *_jobs("smollm2-135m:1024", (*IDLE, *COMMON[1:]), idle_share=_SHARES, beta=0.0, length=64),
            *_jobs("smollm2-135m:1024", IDLE, dtype="float32", idle_share=(0.0, 0.5), beta=0.0, length=64),
            *_jobs(_counts("smollm2-135m", 2048), NEAREST),
            *_lengths("qwen2.5-0.5b", (128, 256, 512, 1024), COMMON, rounds=0, memory=COMMON),
        ],
        "cuda": [
            *_jobs("qwen2.5-1.5b:16384", (*IDLE, *COMMON[1:]), idle_share=(*_SHARES, 1.0), beta=0.0, length=512),
            *_jobs(_counts("qwen2.5-1.5b", 65536), NEAREST),
            *_lengths("qwen2.5-7b", (512, 1024, 2048, 4096, 8192), (*COMMON, "floor", "verl*")),
        ],
    },
    # Time and error of sparse gradients of the logits, by entropy of the policy.
    "sparse": {
        "cpu": [
            *_jobs("smollm2-135m:2048", SPARSE, memory=SPARSE[:2], dtype=BOTH, length=256, temperature=(0.7, 1.0)),
            *_jobs("smollm2-135m:2048", SPARSE, dtype=BOTH, length=256, entropy=5.0),
        ],
        "cuda": _jobs(_GPU_HEADS[:2], SPARSE, entropy=(1.0, 2.5, 5.0)),
    },
    # Rounding errors of the weight's gradient where the sum over chunks has 16 bits.
    "dweight": {
        "cpu": _jobs("smollm2-135m:2048", CHUNKED, rounds=1, length=256, temperature=(0.7, 1.0)),
        "cuda": _jobs(_GPU_HEADS[:2], CHUNKED, rounds=1, entropy=(1.0, 2.5)),
    },
    # Errors against float64, for random ids and for ids that the policy sampled.
    "precision": {
        "cpu": [
            *_jobs(
                ("smollm2-135m:2048", "qwen2.5-0.5b:1024", "llama-3.2-1b:512"), PRECISE, rounds=1, entropy=(0.0, 1.0)
            ),
            *_jobs("smollm2-135m:2048", PRECISE, rounds=1, temperature=(0.7, 1.0)),
        ],
        "cuda": _jobs(_GPU_HEADS[:3], PRECISE, rounds=1, entropy=(0.0, 1.0)),
    },
    # Log-probabilities beside those of engines, by the precision of both heads.
    "mismatch": {
        kind: _jobs("smollm2-135m:512", ("ours-head-*",), mode="forward", length=128, entropy=1.0)
        for kind in ("cpu", "cuda")
    },
    # The divergence to a teacher's distribution over the whole vocabulary.
    "teachers": {
        "cpu": [
            *_jobs("smollm2-135m:2048", TEACHERS, dtype=BOTH, mode="reverse_kl", memory=TEACHERS),
            *_jobs("smollm2-135m:2048", TEACHERS, dtype=BOTH, mode=("forward_kl", "jsd")),
            *_jobs(("qwen2.5-0.5b:512", "llama-3.2-1b:256"), TEACHERS, dtype=BOTH, mode="reverse_kl"),
        ],
        "cuda": _jobs(_GPU_HEADS[:2], TEACHERS, mode=("reverse_kl", "jsd")),
    },
    # One teacher, and ten that each have a tenth of the tokens.
    "several-teachers": {
        "cpu": _jobs("smollm2-135m:4096", MANY_TEACHERS, dtype=BOTH, mode="reverse_kl", memory=MANY_TEACHERS),
        "cuda": _jobs(_GPU_HEADS[:2], MANY_TEACHERS, mode="reverse_kl"),
    },
    # Several ids per token: a step with a teacher on the policy's likeliest ids, log-probabilities of several ids with
    # and without a gradient, and the search for the ids that a sampler would keep.
    "top-k": {
        kind: [
            *_jobs(shape, SEVERAL_IDS, dtype=dtype, beta=0.0),
            *_jobs(shape, SEARCHES, dtype=dtype, mode="forward"),
        ]
        for kind, shape, dtype in (("cpu", "smollm2-135m:1024", "float32"), ("cuda", "llama-3-8b:16384", "bfloat16"))
    },
    # Whole models.
    "trainer": {
        "cpu": _whole("trainer", "smollm2-135m:1024", 128, dtype="float32", memory=WHOLES["trainer"], rounds=7),
        "cuda": _whole("trainer", "qwen2.5-0.5b:32768", 4096),
    },
    "sampling": {
        kind: [
            *_whole("sampling", shape, length),
            *_whole("train", shape, length),
            *_whole("sampling", sampling_shapes, length),
        ]
        for kind, shape, sampling_shapes, length in (
            ("cpu", "tiny:96", "tiny:48", 6),
            ("cuda", "qwen2.5-0.5b:8192", ("qwen2.5-0.5b:32768", "qwen2.5-0.5b:2048"), 128),
        )
    },
}
SETS["targets"] = SETS["heads"]  # the name of this set in committed results
