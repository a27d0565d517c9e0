"""Every argument with one value per token, in every shape, in memory of its own and as a view of a larger tensor: what
is accepted means what the specification says, the rest is refused by name, and no kernel is given an address behind
which there is less than it reads. Triton's interpreter checks each address besides (triton_interpreter.py)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Batch, Result, assert_close, call, leaves, make_batch, reference, tensors
from helpers import packed as packed_batch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import kernels
from grpo_kernels.kernels.operations import Backend, HeadChunk, LogitChunk
from grpo_kernels.objective.tokens import Tokens
from grpo_kernels.reference import reference_logps

PER_TOKEN = ("old_logps", "ref_logps", "rollout_logps", "completion_mask")
PER_SEQUENCE = ("advantages", "rollout_weights", "token_weights", "temperature")
BACKENDS = ("cpu", "torch", "triton", "cuda")
LAYOUTS = (
    "batch",
    "batch, masked",
    "one sequence",
    "one token each",
    "packed",
    "packed, masked",
    "packed, one sequence",
)

# Emulated kernels take long, and get one value per token in any layout.
PLACES = [
    p for p in itertools.product(BACKENDS, LAYOUTS) if p[0] in ("cpu", "torch") or p[1] in ("batch", "packed, masked")
]


def make(layout: str) -> tuple[Batch, int]:
    """(a batch with every argument, one value per token or, where that is possible, per sequence (S, 1); S)."""
    g = torch.Generator().manual_seed(len(layout))
    count, length = {"one sequence": (1, 5), "one token each": (3, 1), "packed, one sequence": (1, 4)}.get(
        layout, (3, 5)
    )
    batch = make_batch(1, sequences=count, length=length, width=8, vocab=21)
    logits = batch.hidden.double() @ batch.weight.double().T
    logps = reference_logps(logits, batch.ids)[0].float()
    for name, spread in (("old_logps", 0.1), ("ref_logps", 0.3), ("rollout_logps", 0.2)):
        batch.options[name] = (logps + spread * torch.rand(count, length, generator=g)).clamp(max=-0.01)
    for name in ("rollout_weights", "token_weights"):
        batch.options[name] = 0.5 + torch.rand(count, 1, generator=g)
    if layout.startswith("packed"):
        batch = packed_batch(batch, torch.tensor([2, 5, 1]) if count == 3 else torch.tensor([4]))
    if "masked" in layout:  # without a mask nothing is rewritten on the way to a kernel
        batch.options["completion_mask"] = torch.ones(batch.ids.shape, dtype=torch.bool)
        batch.options["completion_mask"].view(-1)[1] = False
    return batch, count


def meaning(name: str, x: Tensor, ids: Tensor, count: int, offsets: Tensor | None) -> Tensor | None:
    """One value per token; None for a shape that is refused."""
    if name == "temperature" and x.numel() == 1:
        return x.reshape(()).expand(ids.shape)
    if x.shape == ids.shape:
        return x
    if name not in PER_SEQUENCE or x.shape not in ((count,), (count, 1)):
        return None
    return x.reshape(-1, 1).expand(ids.shape) if offsets is None else x.reshape(-1).repeat_interleave(offsets.diff())


def shapes(ids: Tensor, count: int) -> list[tuple[int, ...]]:
    last = ids.shape[-1]
    found = [
        (),
        (1,),
        (1, 1),
        (count,),
        (count, 1),
        tuple(ids.shape),
        (last,),
        (ids.numel(),),
        (1, last),
        (*ids.shape, 1),
    ]
    return list(dict.fromkeys(found))


def stored(x: Tensor, way: str) -> Tensor:
    """x itself, or as a view of a larger tensor of NaN: its front, or every other element."""
    if way == "own memory":
        return x
    behind = torch.full((2 * x.numel() + 64,), math.nan).to(x.dtype)  # True as bool
    view = behind[: x.numel()] if way == "front" else behind[: 2 * x.numel() : 2]
    return view.copy_(x.reshape(-1)).as_strided(x.shape, [s * view.stride(0) for s in x.contiguous().stride()])


def check_addresses(monkeypatch: Any, backend: str, count: int) -> None:
    """Before each operation of the backend: what it finds by a token's place has one value for each token."""

    def whole(name: str, x: object, number: int) -> None:
        if isinstance(x, Tensor):
            assert x.shape[:1] == (number,) and x.dim() == 1 and x.is_contiguous(), f"{name}: {tuple(x.shape)}"

    def check(name: str, x: object) -> None:
        if isinstance(x, (LogitChunk, HeadChunk)):
            for field in ("ids", "temperature"):
                whole(f"{name}, {field}", getattr(x, field), count)
            for field, y in x.stats._asdict().items():
                whole(f"{name}, {field}", y, count)
            teacher = getattr(x, "teacher", None)
            for field in ("weight", "divergence", "policy_kl", "lse") if teacher is not None else ():
                whole(f"{name}, teacher's {field}", getattr(teacher, field), count)
        elif isinstance(x, Tokens):
            for field in dataclasses.fields(x):
                if field.name != "entropy_threshold":
                    whole(f"{name}, {field.name}", getattr(x, field.name), count)

    table = kernels.get_backend(backend)

    def checked(name: str, operation: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            for x in args:
                check(name, x)
            if name in ("gradient", "objective"):  # d loss / d logp and d loss / d entropy; logp, entropy, dlogp
                for x in args[1:3] if name == "gradient" else args[1:4]:
                    whole(name, x, count)
            return operation(*args, **options)

        return run

    names = ("statistics", "gradient", "divergence", "exponentials", "fused_exponentials", "fused_logp", "objective")
    operations = {n: checked(n, x) for n in names if (x := getattr(table, n)) is not None}
    wrapped, load = dataclasses.replace(table, **operations), kernels._load
    assert isinstance(wrapped, Backend)
    monkeypatch.setattr(kernels, "_load", lambda name: (wrapped, "") if name == backend else load(name))


CONFIG = gk.GRPOConfig(beta=0.1, aggregation="seq_mean", epsilon_low=0.3, epsilon_high=0.4)


def with_argument(batch: Batch, name: str, x: Tensor) -> tuple[Batch, gk.GRPOConfig]:
    if name == "temperature":
        return batch, dataclasses.replace(CONFIG, temperature=x)
    return (
        dataclasses.replace(batch, advantages=x) if name == "advantages" else batch.with_options(**{name: x})
    ), CONFIG


def values(name: str, shape: tuple[int, ...], batch: Batch) -> Tensor:
    given = batch.options.get(name)
    if given is not None and given.shape == shape:
        return given
    x = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) + 0.5
    if name == "completion_mask":
        return torch.ones(shape, dtype=torch.bool)
    return -x if name.endswith("logps") else x


def run(batch: Batch, config: gk.GRPOConfig, backend: str) -> Result:
    own = leaves(batch)
    out = call(own, config, backend)
    out.loss.backward()
    grads = {"hidden": own.hidden.grad, "weight": own.weight.grad}
    return Result(out.loss.detach(), out.logps, out.entropy, out.metrics, grads)


@pytest.mark.parametrize(("backend", "layout"), PLACES)
def test_a_shape_of_the_loss_is_expanded_or_refused(layout, backend, monkeypatch):
    batch, count = make(layout)
    check_addresses(monkeypatch, backend, batch.ids.numel())
    ways = ("own memory", "front", "every other") if backend in ("cpu", "torch") else ("front",)
    accepted = 0
    for name, shape in itertools.product((*PER_TOKEN, *PER_SEQUENCE), shapes(batch.ids, count)):
        x = values(name, shape, batch)
        expanded = meaning(name, x, batch.ids, count, batch.options.get("cu_seqlens"))
        if expanded is None:
            for function in (run, lambda *given: gk.grpo_loss_from_logps(
                batch.options["old_logps"], given[0].advantages, config=given[1], **given[0].options
            )):  # fmt: skip
                if name != "temperature" or function is run:  # log-probabilities have none
                    with pytest.raises(ValueError, match=f"{name} has shape"):
                        function(*with_argument(batch, name, x), backend)
            continue
        exact = reference(*with_argument(batch, name, expanded))
        for way in ways:
            assert_close(run(*with_argument(batch, name, stored(x, way)), backend), exact, 5e-6)
            accepted += 1
    assert accepted >= 15 * len(ways)


def readers(batch: Batch, backend: str, offsets: Tensor | None) -> dict[str, tuple[Callable[[Tensor], Tensor], bool]]:
    """What the functions besides the losses compute at a temperature, and whether they know the sequences."""
    head = dict(hidden=batch.hidden, lm_head_weight=batch.weight, completion_mask=batch.options.get("completion_mask"))
    teacher, of_ids = gk.Teacher(batch.hidden + 0.1, batch.weight.flip(0)), head | dict(completion_ids=batch.ids)
    with_teacher = head | dict(teacher=teacher, backend="torch" if backend == "cuda" else backend)
    sequences, padded = {} if offsets is None else {"cu_seqlens": offsets}, offsets is None

    def policy_loss(t: Tensor) -> Tensor:
        return gk.fused_policy_loss(
            **of_ids, loss_fn=lambda c: c.logps.sum(), temperature=t, backend=backend, **sequences
        )

    return {
        "fused_logps": (lambda t: gk.fused_logps(**of_ids, temperature=t, backend=backend)[0], padded),
        "fused_top_k": (lambda t: gk.fused_top_k(**head, k=3, temperature=t, backend=backend)[1], padded),
        "sampling_support": (lambda t: gk.sampling_support(**of_ids, temperature=t, top_k=9, top_p=0.8).mass, padded),
        "fused_divergence": (lambda t: gk.fused_divergence(**with_teacher, temperature=t), padded),
        "fused_distillation_loss": (
            lambda t: gk.fused_distillation_loss(**with_teacher, temperature=t, **sequences).divergence, True
        ),
        "fused_policy_loss": (policy_loss, True),
    }  # fmt: skip


@pytest.mark.parametrize(("backend", "layout"), PLACES)
def test_a_temperature_of_the_other_functions_is_expanded_or_refused(layout, backend, monkeypatch):
    batch, count = make(layout)
    ids, mask, offsets = batch.ids, batch.options.get("completion_mask"), batch.options.get("cu_seqlens")
    check_addresses(monkeypatch, backend, ids.numel())
    functions = readers(batch, backend, offsets)
    for shape, (function, (compute, by_sequence)) in itertools.product(shapes(ids, count), functions.items()):
        x = values("temperature", shape, batch)
        expanded = meaning("temperature", x, ids, count if by_sequence else -1, offsets)
        if expanded is None:
            with pytest.raises(ValueError, match="temperature has shape"):
                compute(x)
            continue
        for way in ("front", "every other"):
            found = compute(stored(x, way))
            assert torch.equal(found, compute(expanded.clone())), function
        if function == "fused_logps":
            exact = reference_logps(batch.hidden.double() @ batch.weight.double().T, ids, temperature=expanded.double())
            torch.testing.assert_close(found.double(), exact[0] * (1 if mask is None else mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["batch", "packed"])
def test_shapes_are_expanded_inside_a_compiled_function(layout):
    batch, count = make(layout)
    given = {"advantages": values("advantages", (count,), batch)}
    given |= {
        name: stored(values(name, (count, 1), batch), "every other") for name in ("rollout_weights", "token_weights")
    }
    batch = dataclasses.replace(batch.with_options(**given), advantages=given["advantages"])
    del batch.options["advantages"]
    torch._dynamo.reset()
    for shape in ((1,), (count, 1)):
        config = dataclasses.replace(CONFIG, temperature=stored(values("temperature", shape, batch), "front"))
        own = leaves(batch)
        step = torch.compile(
            lambda own=own, config=config: call(own, config, "cpu"), fullgraph=True, backend="aot_eager"
        )
        out = step()
        expected = run(batch, config, "cpu")
        out.loss.backward()
        assert torch.equal(out.loss, expected.loss) and torch.equal(own.hidden.grad, expected.grads["hidden"])
        assert all(torch.equal(x, expected.metrics[name]) for name, x in out.metrics.items())
    torch._dynamo.reset()


def test_one_value_per_token_or_per_sequence_is_asked_for_where_a_shape_says_both():
    """Three tokens in three sequences, of which one is empty."""
    batch, _ = make("packed")
    keep = slice(0, 3)
    given = {name: x[keep] for name, x in batch.options.items() if name in PER_TOKEN}
    given |= dict(cu_seqlens=torch.tensor([0, 1, 1, 3]), advantages=torch.ones(3, 1))
    batch = Batch(batch.hidden[keep], batch.weight, batch.ids[keep], torch.ones(3, 1), None, given)
    del batch.options["advantages"]
    call(batch, CONFIG)
    for name in PER_SEQUENCE:
        with pytest.raises(ValueError, match=f"{name} has shape .3,., and there are as many tokens as sequences"):
            call(*with_argument(batch, name, torch.ones(3)))


# --- types ----------------------------------------------------------------------------------------------------------

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TYPES = dict.fromkeys((*PER_TOKEN[:3], *PER_SEQUENCE), FLOATS)
TYPES |= {"advantages": (*FLOATS, torch.int64, torch.uint8), "completion_mask": (torch.uint8, torch.int64, *FLOATS)}


@pytest.mark.parametrize("policy", [torch.float64, torch.float32, torch.bfloat16])
def test_any_type_of_an_argument_beside_any_type_of_the_policy(policy):
    """Numbers that every type has change no bit, whatever type they come in; in every public loss."""
    batch, _ = make("batch, masked")
    eighths = {n: (x * 8).round() / 8 for n, x in batch.options.items() if n != "completion_mask"}
    batch = dataclasses.replace(batch.with_options(**eighths), advantages=torch.tensor([2.0, 1.0, 3.0])).head_as(policy)
    logps = batch.options["old_logps"].to(policy)

    def results(changed: Batch, config: gk.GRPOConfig) -> list[Tensor]:
        found = run(changed, config, "auto")
        out = gk.grpo_loss_from_logps(logps, changed.advantages, config=config, **changed.options)
        logits = changed.hidden @ changed.weight.T
        of_logits = gk.grpo_loss_from_logits(logits, batch.ids, changed.advantages, config=config, **changed.options)
        return [*tensors(found).values(), *found.metrics.values(), out.loss, *out.metrics.values(), of_logits.loss]

    for name, dtypes in TYPES.items():
        x = {"advantages": batch.advantages, "temperature": torch.tensor([0.5, 1.5, 1.0])}.get(name)
        x = batch.options[name] if x is None else x
        expected = results(*with_argument(batch, name, x))
        for dtype in dtypes:
            found = results(*with_argument(batch, name, x.to(dtype)))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (name, dtype)
    x = torch.tensor([0.5, 1.5, 1.0])
    for name, (compute, _) in readers(batch, "auto", None).items():
        for dtype in FLOATS:
            assert torch.equal(compute(x.to(dtype)), compute(x)), (name, dtype)
    for dtype in TYPES["completion_mask"]:
        other = batch.with_options(completion_mask=batch.options["completion_mask"].to(dtype))
        pairs = zip(readers(other, "auto", None).items(), readers(batch, "auto", None).values(), strict=True)
        for (name, (compute, _)), (expected, _) in pairs:
            assert torch.equal(compute(x), expected(x)), (name, dtype)
