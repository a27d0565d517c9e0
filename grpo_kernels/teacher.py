"""The teacher of a distillation: a second lm_head over the same vocabulary, whose distribution draws the policy's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .argument import no_effect
from .checks.arguments import (
    Sizes,
    check_by_table,
    check_sizes,
    check_tensor,
    check_top_k,
    checks_values,
    constant,
    num_sequences_of,
    products_dtype,
)
from .checks.table import ARGUMENTS
from .checks.tokens import TokenLayout, per_token
from .config import GRPOConfig, check_count, check_one_of, check_option
from .sampling_mask import SamplingMask, check_sampling_mask

TopKMode = Literal["tail", "renormalize"]
MASS_SLACK = 1e-3  # of log-probabilities in 16 bits


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's distribution q = softmax(z) at each token, z = softcap(logit_scale * (hidden W^T + b)) / temperature.

    hidden: (B, T, H') or packed (N, H'), row t predicts the same token as the policy's row t; H' is the teacher's own.
    weight: (V, H') with the policy's V and order of ids.
    bias: (V,).
    logit_scale, logit_softcap: for a model see `grpo_kernels.logit_transform.logit_transform(model.config)`.

    The tensors are float32, bfloat16, float16 or float64, of one type, which may differ from the policy's; or a float32
    head of 16-bit hidden states; under torch.autocast, in whose type the products then are, any of these but float64.
    The temperature is the policy's. Nothing requires a gradient: none goes to the teacher.

    top_k: K of [1, V] for the divergence over the policy's K likeliest ids of each token (ties by id), which are
    constants; None: over the whole vocabulary. mode: what it takes for the other ids, as in `TopKTeacher`. With
    "renormalize" the teacher costs 2 N K H' operations, with "tail", whose q of an id is relative to the whole
    vocabulary, 2 N H' V more; the memory is one chunk of logits, and O(N K).

    Raises TypeError or ValueError, by name, for tensors that do not fit together.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    top_k: int | None = None
    mode: TopKMode = "tail"

    def to(self, device: torch.device | str | int) -> Teacher:
        """Returns the same on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, hidden=self.hidden.to(device), weight=self.weight.to(device), bias=bias)

    def __post_init__(self) -> None:
        sizes: Sizes = {}
        check_by_table("Teacher.hidden", self.hidden, sizes)
        check_by_table("Teacher.weight", self.weight, sizes, self.hidden)
        if self.bias is not None:
            check_by_table("Teacher.bias", self.bias, sizes, self.hidden)
        for name in ("logit_scale", "logit_softcap"):
            object.__setattr__(self, name, check_option(name, getattr(self, name)))
        check_one_of("mode", self.mode, get_args(TopKMode))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", check_count("top_k", self.top_k))
        mode = None if self.mode == "tail" else self.mode
        has_k = self.top_k is not None
        no_effect("mode", mode, "without top_k", unless=has_k, instead="give both, or leave it out")


@dataclass(frozen=True, eq=False)
class TopKTeacher:
    """A teacher's distribution that is known at K ids per token.

    ids: (B, T, K) or packed (N, K) int32 or int64, in any order, distinct within a token; -1 in places that a token
    does not use. logps: the same shape, floating point: the teacher's log-probabilities of these ids, nats, at the
    temperature of the loss. mode: what the divergence takes for the other ids (docs: grpo_kernels/README.md).

        "tail"         one more outcome, with what mass is left on either side
        "renormalize"  nothing: both distributions are divided by their mass over the K ids

    Raises TypeError or ValueError, by name; on a CPU (on a GPU with GRPO_KERNELS_DEBUG=1) also for ids that repeat,
    log-probabilities that are NaN or above 0, and mass of a token above 1 by more than 1e-3.
    """

    ids: Tensor
    logps: Tensor
    mode: TopKMode = "tail"

    def __post_init__(self) -> None:
        sizes: Sizes = {}
        check_by_table("TopKTeacher.ids", self.ids, sizes)
        check_by_table("TopKTeacher.logps", self.logps, sizes, self.ids)
        check_one_of("mode", self.mode, get_args(TopKMode))
        if checks_values(self.ids.device):
            self._check_values()

    def _check_values(self) -> None:
        used = self.ids >= 0
        ordered = torch.where(used, self.ids, -1).sort(-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
            raise ValueError("TopKTeacher.ids repeats an id of a token; expected distinct ids, -1 where there is none")
        logps = torch.where(used, self.logps.detach().double(), -math.inf)
        wrong = logps.isnan() | (logps > MASS_SLACK)
        if bool(wrong.any()):
            raise ValueError(f"TopKTeacher.logps holds {logps[wrong][0].item()}; expected numbers of at most 0 nats")
        mass = logps.exp().sum(-1)
        if mass.numel() and float(mass.max()) > 1 + MASS_SLACK:
            raise ValueError(f"TopKTeacher.logps of a token add up to a mass of {float(mass.max()):.4f}; expected <= 1")

    def to(self, device: torch.device | str | int) -> TopKTeacher:
        """Returns the same on another device."""
        return replace(self, ids=self.ids.to(device), logps=self.logps.to(device))

    @property
    def sampling_mask(self) -> SamplingMask:
        """Returns the same ids as the ids that a token keeps.

        With mode "renormalize", whose divergence is over these ids, a call with both takes the time of K ids
        (`fused_distillation_loss` makes it).
        """
        return SamplingMask.from_padded(torch.where(self.ids < 0, -1, self.ids))

    @classmethod
    def from_lists(
        cls, entries: Sequence[Sequence[Any]], *, length: int | None = None, mode: TopKMode = "tail"
    ) -> TopKTeacher:
        """Takes what sampling engines return as top log-probabilities: for each sequence a list of tokens, each a
        mapping of ids to log-probabilities (vLLM's, whose values may be objects with `logprob`), or a list of
        (log-probability, id, ...) (SGLang's), or None for a token without any. The result is (B, T, K); T is `length`,
        by default the longest sequence's."""
        if length is not None:
            length = check_count("length", length)
        rows = [[_top_pairs(token) for token in sequence] for sequence in entries]
        longest = max(map(len, rows), default=0)
        if length is not None and length < longest:
            raise ValueError(f"length={length}; expected at least {longest}, the tokens of the longest sequence")
        k = max((len(token) for row in rows for token in row), default=0)
        if k == 0:
            raise ValueError("entries holds no log-probability; expected at least one for each token")
        shape = len(rows), longest if length is None else length, k
        ids, logps = torch.full(shape, -1, dtype=torch.int64), torch.full(shape, -math.inf)
        for i, row in enumerate(rows):
            for t, token in enumerate(row):
                if token:
                    token_ids, numbers = zip(*token, strict=True)
                    ids[i, t, : len(token)] = torch.tensor(token_ids)
                    logps[i, t, : len(token)] = torch.tensor(numbers, dtype=torch.float32)
        return cls(ids, logps, mode)


class SeveralTeachers(NamedTuple):
    """Teachers with the same `top_k`, `mode` and types, of which a token has at most one.

    teacher_of: the index of each token's teacher, -1 for none, int64 in the shape of the tokens. The hidden states of a
        teacher are those of its own tokens, masked ones too, in their order.
    """

    teachers: tuple[Teacher, ...]
    teacher_of: Tensor


AnyTeacher = Teacher | TopKTeacher | SeveralTeachers


def combined_teachers(
    teacher: Teacher | TopKTeacher | Sequence[Teacher] | None,
    teacher_of: Tensor | None,
    hidden: Tensor,
    cu_seqlens: Tensor | None = None,
) -> AnyTeacher | None:
    """Returns what a public function received as one object. Where there are several teachers, teacher_of is expanded
    to the tokens of hidden (B, T, H) or (N, H)."""
    if not isinstance(teacher, (list, tuple)):
        no_effect("teacher_of", teacher_of, "without a list of teachers")
        return teacher  # type: ignore[return-value]  # check_teacher refuses other types
    if teacher_of is None:
        raise ValueError("teacher is a list and teacher_of is None; expected the index of each sequence's or token's")
    if not teacher:
        raise ValueError("teacher is an empty list; expected at least one grpo_kernels.Teacher")
    for i, x in enumerate(teacher):
        if not isinstance(x, Teacher):
            raise TypeError(f"teacher[{i}] is a {type(x).__name__}; expected a grpo_kernels.Teacher")
    tokens = hidden[..., 0]
    num_sequences = -1 if cu_seqlens is None and tokens.dim() == 1 else num_sequences_of(tokens, cu_seqlens)
    layout = TokenLayout(tokens.shape, num_sequences, cu_seqlens, tokens, torch.int64)
    return SeveralTeachers(tuple(teacher), per_token("teacher_of", teacher_of, layout))


def heads_of(teacher: AnyTeacher | None) -> tuple[Teacher, ...]:
    """Returns the teachers that have hidden states and a weight."""
    if isinstance(teacher, SeveralTeachers):
        return teacher.teachers
    return (teacher,) if isinstance(teacher, Teacher) else ()


def teacher_signature(teacher: AnyTeacher | None) -> list[tuple[Any, ...]]:
    """Returns what ranks with slices of the vocabulary must have in common: all but the rows of slices."""
    records = heads_of(teacher) if teacher is None or heads_of(teacher) else (teacher,)
    return [
        (n, x.shape[1:], x.dtype) if isinstance(x, Tensor) else (n, x)
        for each in records
        for n, x in vars(each).items()
    ]


def has_full_vocab(teacher: AnyTeacher | None) -> bool:
    """Returns whether logits of a teacher over the whole vocabulary stand beside the policy's."""
    heads = heads_of(teacher)
    return bool(heads) and heads[0].top_k is None


def _top_pairs(token: Any) -> list[tuple[int, float]]:
    """Returns (id, log-probability) of a token's entries."""
    if token is None:
        return []
    pairs: list[tuple[Any, Any]] | None = None
    if isinstance(token, Mapping):
        pairs = [(i, x.logprob if hasattr(x, "logprob") else x) for i, x in token.items()]
    elif isinstance(token, Sequence) and all(isinstance(x, Sequence) and len(x) >= 2 for x in token):
        pairs = [(x[1], x[0]) for x in token]
    with suppress(TypeError, ValueError):
        if pairs is not None:
            return [(int(i), float(x)) for i, x in pairs]
    raise TypeError(
        f"entries holds {token!r}; expected for each token a mapping of ids to log-probabilities, a list of "
        "(log-probability, id) or None"
    )


def refuse_with_teacher(teacher: AnyTeacher, sampling_mask: SamplingMask | None, config: GRPOConfig) -> None:
    if sampling_mask is not None and isinstance(teacher, TopKTeacher) and teacher.mode == "renormalize":
        teacher_mask = teacher.sampling_mask
        check_sampling_mask(sampling_mask, teacher.ids.shape[:-1], teacher.ids)
        pairs = (teacher_mask.ids, sampling_mask.ids), (teacher_mask.counts, sampling_mask.counts)
        if not all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs):
            raise ValueError("sampling_mask holds other ids than the TopKTeacher; expected its own sampling_mask")
        sampling_mask = None
    for name, x in {"sampling_mask": sampling_mask, "config.sparse_backward": config.sparse_backward}.items():
        if x is not None:
            raise ValueError(
                f"{name} is given with a teacher; give one. A TopKTeacher with mode 'renormalize' takes its own "
                "sampling_mask"
            )


def check_teacher(teacher: object, config: GRPOConfig, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Checks a teacher against the policy's hidden states and weight, whose products are in `dtype`, and config."""
    if teacher is None:
        if config.distill_coef != 0.0:
            raise ValueError(f"teacher is None and distill_coef={config.distill_coef}; the divergence needs a teacher")
        return
    if not isinstance(teacher, (Teacher, TopKTeacher, SeveralTeachers)):
        raise TypeError(
            f"teacher is a {type(teacher).__name__}; expected a grpo_kernels.Teacher, a list of them, or a TopKTeacher"
        )
    if config.distill_coef == 0.0:
        raise ValueError("teacher has no effect with config.distill_coef=0; set it, or leave the teacher out")
    tokens: Sizes = {"tokens": hidden.shape[:-1]}
    if isinstance(teacher, TopKTeacher):
        for name in ("ids", "logps"):
            _check_constant(f"TopKTeacher.{name}", getattr(teacher, name), hidden)
        check_sizes("TopKTeacher.ids", teacher.ids, ARGUMENTS["TopKTeacher.ids"], tokens)
        return
    for i, head in enumerate(heads_of(teacher)):
        name = "Teacher" if isinstance(teacher, Teacher) else f"teacher[{i}]"
        _check_head(name, head, hidden, weight, dtype)
        if isinstance(teacher, Teacher):
            check_sizes("Teacher.hidden", head.hidden, ARGUMENTS["Teacher.hidden"], tokens)
        elif (found := _kind_of(head)) != (expected := _kind_of(teacher.teachers[0])):
            raise ValueError(
                f"{name} has top_k, mode and types {found}, and teacher[0] {expected}; expected those of all teachers "
                "to be the same"
            )


def _kind_of(teacher: Teacher) -> tuple[object, ...]:
    """Returns what teachers of one call have in common."""
    return teacher.top_k, teacher.mode, teacher.hidden.dtype, teacher.weight.dtype


def _check_constant(name: str, x: Tensor, hidden: Tensor) -> None:
    check_tensor(name, x, hidden)
    constant(name, x)


def check_teacher_values(teacher: AnyTeacher | None, vocab_size: int, mask: Tensor | None) -> None:
    """Checks top_k, or the ids of a TopKTeacher, against the rows of the whole lm_head."""
    for head in heads_of(teacher)[:1]:
        if head.top_k is not None:
            check_top_k("Teacher.top_k", head.top_k, vocab_size)
    if not isinstance(teacher, TopKTeacher) or not checks_values(teacher.ids.device):
        return
    highest = int(teacher.ids.max()) if teacher.ids.numel() else -1
    if highest >= vocab_size:
        raise ValueError(f"TopKTeacher.ids holds {highest}; expected ids < {vocab_size}, the rows of lm_head_weight")
    empty = (teacher.ids < 0).all(-1)
    excluded = (torch.where(teacher.ids < 0, -math.inf, teacher.logps) == -math.inf).all(-1) & ~empty
    wrong = empty | excluded if teacher.mode == "renormalize" else empty
    if mask is not None:
        wrong = wrong & mask.bool()
    if bool(wrong.any()):
        place = wrong.nonzero()[0]
        what = "no id" if bool(empty[tuple(place)]) else "no mass to renormalize"
        raise ValueError(f"TopKTeacher.ids{place.tolist()} has {what}; expected some at unmasked positions")


def _check_head(kind: str, teacher: Teacher, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Checks the tensors of a teacher, which errors call `kind`."""
    fields = ("hidden", "weight", "bias")  # dynamo has no vars()
    tensors = {f"{kind}.{name}": getattr(teacher, name) for name in fields if getattr(teacher, name) is not None}
    for name, x in tensors.items():
        _check_constant(name, x, hidden)
    policy_rows, teacher_rows = len(weight), len(teacher.weight)
    if policy_rows != teacher_rows:
        longer = "lm_head_weight" if policy_rows > teacher_rows else f"{kind}.weight"
        raise ValueError(
            f"{kind}.weight has {teacher_rows} rows and lm_head_weight {policy_rows}; expected one vocabulary, with "
            "vocab_parallel_group this rank's rows of it. "
            f"Where the further rows are padding, pass {longer}[:{min(policy_rows, teacher_rows)}], and its bias alike"
        )
    compute_dtype = products_dtype(teacher.hidden, teacher.weight, teacher.bias)
    types = {x.dtype for x in tensors.values()}
    if (compute_dtype is None or dtype == torch.float64) and len(types) > 1:  # autocast leaves a float64 policy alone
        type_names = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items())
        raise TypeError(f"{type_names}; expected one type, a float32 head of 16-bit hidden states, or torch.autocast")
    if torch.float64 in types and dtype != torch.float64:
        raise TypeError(f"{kind}.hidden is float64 and the policy's products are {dtype}; expected float32 or 16 bits")
