"""Ranks with a slice of the vocabulary each: the loss of one process, the same on every rank.

Ranks are started once for each number of them, and walk all cases, over gloo.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import verl_package
from conftest import run_gpu_backends_on_cpu
from helpers import (
    MASK_PATHS,
    Batch,
    assert_close,
    assert_within,
    call,
    errors,
    fused,
    leaves,
    make_batch,
    make_sampling_mask,
    off_policy,
    reference,
    relative,
    use_mask_path,
    whole_chunk,
)
from option_space import POINTS, build, choose
from ranks import assert_same_on_all_ranks, on_all_ranks, run_ranks
from teachers import KINDS, OWN, config_of, make_teacher, make_top_k, teacher_of
from test_plain_tensors import check_dtensors
from torch import distributed

import grpo_kernels as gk
from grpo_kernels.checks import arguments as validate
from grpo_kernels.commands.harness import size_of_loss
from grpo_kernels.head import mask_paths, sparse, vocab_parallel
from grpo_kernels.integrations.sequence_parallel import gather_tokens
from grpo_kernels.kernels.operations import SparseRule
from grpo_kernels.names import DIVERGENCES

VOCAB = 67
SLICES = {1: (VOCAB,), 2: (24, 43), 3: (30, 1, 36)}  # rows of the weight, of any sizes
BACKENDS = ("cpu", "torch")


def rows_of(rank: int, ranks: int) -> slice:
    first = sum(SLICES[ranks][:rank])
    return slice(first, first + SLICES[ranks][rank])


def sliced_teacher(teacher: gk.Teacher, rows: slice) -> gk.Teacher:
    return dataclasses.replace(teacher, weight=teacher.weight[rows].clone(), bias=teacher.bias[rows].clone())


def sliced(batch: Batch, rank: int, group) -> Batch:
    """The batch with the weight and bias of this rank."""
    rows = rows_of(rank, group.size())
    bias = None if batch.bias is None else batch.bias[rows].clone()
    options = batch.options | {"vocab_parallel_group": group}
    teacher = options.get("teacher")
    if isinstance(teacher, gk.Teacher):
        options["teacher"] = sliced_teacher(teacher, rows)
    elif isinstance(teacher, list):
        options["teacher"] = [sliced_teacher(x, rows) for x in teacher]
    return Batch(batch.hidden.clone(), batch.weight[rows].clone(), batch.ids, batch.advantages, bias, options)


def whole(found, group, rank: int):
    """The result with the weight's gradients of all ranks one below the other."""
    for name in ("weight", "bias"):
        if name in found.grads:
            parts: list = [None] * group.size()
            distributed.all_gather_object(parts, found.grads[name], group=group)
            found.grads[name] = torch.cat(parts)
    return found


CASES = {  # options_of_a_walk has the other surrogates
    **{name: gk.GRPOConfig.preset(name) for name in ("grpo", "gspo", "vespo", "rloo")},
    "gmpo": gk.GRPOConfig(surrogate="gmpo"),
    "grpo in chunks": gk.GRPOConfig(beta=0.1, chunk_rows=5, entropy_coef=0.01),
    "softcap, scale, temperature": gk.GRPOConfig(logit_softcap=3.0, logit_scale=0.7, temperature=1.3),
    "sequences beyond a chunk": gk.GRPOConfig(importance_sampling_level="sequence", chunk_rows=3, entropy_coef=0.01),
    "static shapes": gk.GRPOConfig(static_shapes=True),
    "tokens with a gradient alone": gk.GRPOConfig(score_inactive=False, chunk_rows=5),
    "a temperature per token": gk.GRPOConfig(temperature=torch.linspace(0.5, 2.0, 36).view(6, 6)),
}


def batches(config: gk.GRPOConfig, mask: gk.SamplingMask | None = None) -> Batch:
    batch = make_batch(0, sequences=6, bias=True, masked=True, vocab=VOCAB)
    batch.ids[:, 0] = torch.tensor([0, 23, 24, 29, 30, 31])  # the last and the first id of slices
    if mask is not None:
        batch.options["sampling_mask"] = mask
    batch = off_policy(batch, config)
    batch.advantages[1] = 0.0  # zero-gradient rows
    if config.beta:
        batch.options["ref_logps"] = batch.options["old_logps"] - 0.1
    return batch


def make_mask(*, least: int = 0) -> gk.SamplingMask:
    """Of the tokens of `batches`: many keep no id of some slice, few their sampled one, some every id."""
    return make_sampling_mask((6, 6), VOCAB, least=least)


def assert_equal_to_one_process(batch: Batch, config: gk.GRPOConfig, backend: str, rank: int, group) -> None:
    found = whole(fused(sliced(batch, rank, group), config, backend), group, rank)
    one = fused(batch, config, backend)
    assert_same_on_all_ranks(found, group)
    assert found.metrics.keys() == one.metrics.keys()
    assert_close(found, one, 2e-5)
    if config.score_inactive:  # otherwise fewer log-probabilities than the reference has
        assert_close(found, reference(batch, config), 2e-5)


def options_of_a_walk(rank: int, group) -> None:
    """Every surrogate at each of its ratio levels, with other options of a call each time."""
    of_each = 35  # points of a surrogate and level: here another KL estimator and aggregation each time
    for i in range(len(POINTS) // of_each):
        point = POINTS[of_each * i + 8 * i % of_each]
        chosen = choose(point, i // 2 % 2)
        batch, config = build(point, chosen, VOCAB)
        with mask_path(chosen["sampling_mask"]):
            found = whole(fused(sliced(batch, rank, group), config, BACKENDS[i % 2]), group, rank)
        assert_same_on_all_ranks(found, group)
        for name, error in errors(found, reference(batch, config), size_of_loss(batch, config)).items():
            assert error <= 2e-5, f"{point}, {chosen}: {name} has a relative error of {error:.2e}"


@contextmanager
def mask_path(path: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_mask_path(patch, path, VOCAB)
        yield


def equal_to_one_process(rank: int, group) -> None:
    """Without a sampling mask, and with one, each configuration by another path to the logits."""
    paths = itertools.cycle(MASK_PATHS)
    for backend, (i, config) in itertools.product(BACKENDS, enumerate(CASES.values())):
        assert_equal_to_one_process(batches(config), config, backend, rank, group)
        if not config.static_shapes:  # refused with a mask
            with mask_path(next(paths)):
                assert_equal_to_one_process(batches(config, make_mask(least=i % 2)), config, backend, rank, group)


def equal_in_16_bits(rank: int, group) -> None:
    """As exact as one process, whose dhidden is rounded once where theirs is summed in float32."""
    configs = gk.GRPOConfig(), gk.GRPOConfig(chunk_rows=5), gk.GRPOConfig(importance_sampling_level="sequence")
    masks = None, make_mask()
    for dtype, backend, config, mask in itertools.product((torch.bfloat16, torch.float16), BACKENDS, configs, masks):
        batch = batches(config, mask).head_as(dtype)
        exact = reference(batch, config)
        with mask_path("both"):
            one = errors(fused(batch, config, backend), exact)
            found = whole(fused(sliced(batch, rank, group), config, backend), group, rank)
        assert_same_on_all_ranks(found, group)
        assert_within(errors(found, exact), one, 1e-5, 1.5)


def teachers(rank: int, group) -> None:
    """Over the whole vocabulary, at K ids, and on the policy's own ids, which ties may take from any slice; a chunk
    whose K ids are all of a slice."""
    chunks = ({}, dict(importance_sampling_level="sequence", chunk_rows=3), dict(logit_softcap=3.0, temperature=1.3))
    for i, (divergence, kind) in enumerate(itertools.product(DIVERGENCES, (*KINDS, *OWN))):
        config = config_of(divergence, **chunks[i % 3])
        batch, teacher = batches(config), teacher_of(kind, 40, logit_scale=0.8, logit_softcap=4.0)
        if kind in OWN:
            batch.weight[20:50:2], batch.bias[20:50:2] = 0.0, 0.5
        batch = batch.with_options(teacher=teacher)
        one = fused(batch, config, BACKENDS[i % 2])
        found = whole(fused(sliced(batch, rank, group), config, BACKENDS[i % 2]), group, rank)
        assert_same_on_all_ranks(found, group)
        assert found.metrics.keys() == one.metrics.keys()
        for name, error in errors(found, one, loss_scale=1.0).items():
            assert error <= 2e-5, (divergence, kind, name, error)
        distillation_alone(batch, config, BACKENDS[i % 2], rank, group)
    for kind in ("whole", *OWN):
        of = torch.tensor([1, -1, 0, 1, 0, 1])
        several = [dataclasses.replace(x, hidden=x.hidden[of == i]) for i, x in enumerate([teacher_of(kind, 40)] * 2)]
        config = config_of("jsd")
        batch = batches(config).with_options(teacher=several, teacher_of=of)
        found = whole(fused(sliced(batch, rank, group), config, "cpu"), group, rank)
        assert_same_on_all_ranks(found, group)
        assert max(errors(found, fused(batch, config, "cpu"), loss_scale=1.0).values()) <= 2e-5, kind
    narrow = batches(config_of("jsd")).with_options(teacher=teacher_of("whole")).head_as(torch.bfloat16)
    exact = reference(narrow, config_of("jsd"))
    one = errors(fused(narrow, config_of("jsd"), "cpu"), exact)
    found = whole(fused(sliced(narrow, rank, group), config_of("jsd"), "cpu"), group, rank)
    assert_within(errors(found, exact), one, 1e-5, 1.5)


def distillation_alone(batch: Batch, config: gk.GRPOConfig, backend: str, rank: int, group) -> None:
    """The losses that are the divergence alone. Both sides exclude the first id of slices, of which one has no other;
    not where the forward KL to known ids would be infinite."""
    rows, bias, teacher = rows_of(rank, group.size()), batch.bias.clone(), batch.options["teacher"]
    if isinstance(teacher, gk.Teacher):
        teacher = dataclasses.replace(teacher, bias=teacher.bias.index_fill(0, torch.tensor([0, 24, 30]), -torch.inf))
    if isinstance(teacher, gk.Teacher) or config.divergence != "forward_kl":
        bias[[0, 24, 30]] = -torch.inf
    batch = dataclasses.replace(batch, bias=bias).with_options(teacher=teacher)
    mine, results = sliced(batch, rank, group), []
    given = dict(divergence=config.divergence, divergence_beta=config.divergence_beta, backend=backend)
    given |= dict(completion_mask=batch.options["completion_mask"], temperature=1.3)
    for own, more in ((leaves(batch), {}), (leaves(mine), {"vocab_parallel_group": group})):
        head = own.hidden, own.weight, own.options["teacher"]
        out = gk.fused_distillation_loss(*head, lm_head_bias=own.bias, **given, **more)
        per_token = gk.fused_divergence(*head, lm_head_bias=own.bias, **given, **more)
        (out.loss + per_token.sin().sum()).backward()
        part = slice(None) if more else rows
        grads = own.hidden.grad, own.weight.grad[part], own.bias.grad[part]
        results.append([out.loss.detach(), out.divergence, out.entropy, per_token.detach(), *grads])
    for i, (one, found) in enumerate(zip(*results, strict=True)):
        assert relative(found, one) <= 2e-5 and one.isfinite().all(), (config.divergence, i, relative(found, one))
    for x in results[1][:5]:
        assert all(torch.equal(x, y) for y in on_all_ranks(x, group))


def k_ids(rank: int, group) -> None:
    """Their log-probabilities with gradients, and the likeliest, with ties, of which a slice has fewer than K."""
    batch = make_batch(1, bias=True, masked=True, vocab=VOCAB)
    batch.weight[20:50:2], batch.bias[20:50:2] = 0.0, 0.5
    batch.bias[50:] = -torch.inf
    mine, mask = sliced(batch, rank, group), batch.options["completion_mask"]
    ids = torch.randint(50, (*batch.ids.shape, 9), generator=torch.Generator().manual_seed(5))
    for backend in BACKENDS:
        alone, own = leaves(batch), leaves(mine)
        options = dict(temperature=1.2, logit_softcap=4.0, backend=backend, completion_mask=mask)
        results = []
        for b, more in ((alone, {}), (own, {"vocab_parallel_group": group})):
            found, entropy = gk.fused_logps(
                b.hidden, b.weight, ids, lm_head_bias=b.bias, entropy=True, **options, **more
            )
            (found.sin().sum() + entropy.square().sum()).backward()
            results.append(found.detach())
        assert torch.allclose(*results, atol=2e-6)
        rows = rows_of(rank, group.size())
        for name, part in (("hidden", slice(None)), ("weight", rows), ("bias", rows)):
            assert relative(getattr(own, name).grad, getattr(alone, name).grad[part]) < 2e-5
        for k in (1, 40, VOCAB):
            one = gk.fused_top_k(batch.hidden, batch.weight, k, lm_head_bias=batch.bias, **options)
            found = gk.fused_top_k(
                mine.hidden, mine.weight, k, lm_head_bias=mine.bias, vocab_parallel_group=group, **options
            )
            assert torch.equal(found[0], one[0]) and torch.allclose(found[1], one[1], atol=2e-6)


def logps_alone(rank: int, group) -> None:
    plain = make_batch(1, bias=True, masked=True, vocab=VOCAB)
    mask = {"sampling_mask": make_sampling_mask(tuple(plain.ids.shape), VOCAB)}
    for backend, path in itertools.product(BACKENDS, ("none", *MASK_PATHS)):
        batch = plain if path == "none" else plain.with_options(**mask)
        alone, own = leaves(batch), leaves(sliced(batch, rank, group))
        options = dict(entropy=True, temperature=1.2, logit_softcap=4.0, backend=backend)
        with mask_path(path):
            one, found = whole_chunk(alone, **options), whole_chunk(own, vocab_parallel_group=group, **options)
            for chunk in (one, found):
                (chunk.logps.sin().sum() + chunk.entropy.square().sum()).backward()
            with torch.no_grad():
                again = whole_chunk(own, vocab_parallel_group=group, **options)
        assert torch.allclose(found.logps, one.logps, atol=2e-6) and torch.equal(again.logps, found.logps)
        assert torch.allclose(found.entropy, one.entropy, atol=2e-6)
        rows = rows_of(rank, group.size())
        for name, part in (("hidden", slice(None)), ("weight", rows), ("bias", rows)):
            assert relative(getattr(own, name).grad, getattr(alone, name).grad[part]) < 2e-5


def kept_ids_outside_of_the_vocabulary(rank: int, group) -> None:
    """An error; where nobody looks, as on a GPU, NaN on all ranks."""
    batch = make_batch(1, vocab=VOCAB)
    mine = sliced(batch, rank, group)
    counts = torch.ones_like(batch.ids).index_fill(0, torch.tensor([0]), 2)
    for backend, path, wrong in itertools.product(BACKENDS, MASK_PATHS, (VOCAB, 2**31 - 1, -1, -(2**31))):
        pairs = torch.tensor(sorted([3, wrong])).repeat(6)
        call = partial(gk.fused_logps, mine.hidden, mine.weight, mine.ids, vocab_parallel_group=group, backend=backend)
        with mask_path(path), pytest.MonkeyPatch.context() as patch:
            for module in (validate, mask_paths):
                patch.setattr(module, "checks_values", lambda device: False)
            mask = gk.SamplingMask(torch.cat([pairs, torch.full((18,), 5)]).int(), counts)
            logps, _ = call(sampling_mask=mask)
            assert logps[0].isnan().all() and logps[1:].isfinite().all()
        with pytest.raises(ValueError, match=rf"SamplingMask\.ids holds {wrong}"):
            call(sampling_mask=mask)


def linear_cross_entropy_of_verl(rank: int, group) -> None:
    """Megatron adds up the gradients of hidden."""
    batch = make_batch(1, vocab=VOCAB)
    mine, labels = sliced(batch, rank, group), batch.ids
    with pytest.MonkeyPatch.context() as patch:
        verl_package.install(patch)
        function = importlib.import_module("grpo_kernels.integrations.verl").linear_cross_entropy
        one, own = ([x.requires_grad_() for x in (b.hidden, b.weight)] for b in (batch, mine))
        expected, found = function(*one, labels, 0.7, "none"), function(*own, labels, 0.7, "none", group)
    for logps, entropy in (expected, found):
        (logps.sum() + 0.1 * entropy.sum()).backward()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert relative(sum(on_all_ranks(own[0].grad, group)), one[0].grad) < 2e-5
    assert relative(own[1].grad, one[1].grad[rows_of(rank, group.size())]) < 2e-5


def sparse_gradients(rank: int, group) -> None:
    """With room for every entry the exact gradient; with room on no rank, or on one alone; in expectation."""
    run_gpu_backends_on_cpu()
    config = gk.GRPOConfig(beta=0.1, entropy_coef=0.02, chunk_rows=8)
    tiny, large = (dataclasses.replace(config, sparse_backward=theta) for theta in (1e-12, 0.1))
    batch = batches(config)
    mine = sliced(batch, rank, group)
    with pytest.MonkeyPatch.context() as patch:
        for backend in (*BACKENDS, "triton", "cuda"):
            exact = fused(batch, config, backend)
            for logits_per_pair, dense in ((1000, 1.0), (1 if rank else 1000, 0.5), (1, 0.0)):
                patch.setattr(
                    mask_paths, "DENSE_LOGITS_PER_GATHERED_ID", dict.fromkeys(("cpu", "cuda"), logits_per_pair)
                )
                found = whole(fused(mine, tiny, backend), group, rank)
                assert found.metrics.pop("sparse/dense") == dense and found.metrics.pop("sparse/kept").isfinite()
                assert_close(found, exact, 2e-5)
        exact, gradients = exact.grads["hidden"], []
        for seed in range(32):  # other random numbers each time, as other places in the batch would have
            patch.setattr(sparse, "SparseRule", lambda theta, first, seed=seed: SparseRule(theta, first + 1000 * seed))
            gradients.append(fused(mine, large, "cpu").grads["hidden"])
    error = torch.stack(gradients) - exact
    assert error.mean(0).norm() <= 1.5 * (error.square().sum() / 32**2).sqrt()


def accumulated(rank: int, group) -> None:
    """dweight into a buffer of the caller's; a frozen slice has none."""
    batch, config = batches(gk.GRPOConfig()), gk.GRPOConfig()
    mine, exact = leaves(sliced(batch, rank, group), "bias"), reference(batch, config)
    total = torch.zeros_like(mine.weight)
    with pytest.MonkeyPatch.context() as patch:  # the rank with the fewest decides
        patch.setattr(vocab_parallel, "multiprocessors_of", lambda _: 100 + rank)
        agreed = vocab_parallel.exchange_and_check(group, mine.hidden, mine.weight, None, (True,) * 3, ())
        assert agreed.multiprocessors == 100
    call(mine, accumulate_into=total).loss.backward()
    assert mine.weight.grad is None and relative(total, exact.grads["weight"][rows_of(rank, group.size())]) < 2e-5
    frozen = leaves(mine, "weight", "bias")
    call(frozen).loss.backward()
    assert relative(frozen.hidden.grad, exact.grads["hidden"]) < 2e-5


def refusals(rank: int, group) -> None:
    """On every rank, in the same step, and the next call works."""
    batch = batches(gk.GRPOConfig())

    def loss(**changes):
        mine = sliced(batch, rank, group)
        given = dict(
            hidden=mine.hidden, lm_head_weight=mine.weight, completion_ids=mine.ids, advantages=mine.advantages,
            lm_head_bias=mine.bias, **mine.options,
        )  # fmt: skip
        return gk.fused_grpo_loss(**given | changes)

    only_here = rank == 1
    shorter = {"hidden": batch.hidden[:, :5], "completion_ids": batch.ids[:, :5], "old_logps": None}
    distils, own = gk.GRPOConfig(distill_coef=0.5), make_teacher((6, 6))
    own = dataclasses.replace(own, weight=own.weight[rows_of(rank, 2)], bias=own.bias[rows_of(rank, 2)])
    with_teacher = {"config": distils, "teacher": dataclasses.replace(own, top_k=3)}
    shorter |= {"ref_logps": None, "completion_mask": None}
    for changes, message in (
        (shorter, r"shape of hidden \(its tokens\) must be the same on all ranks"),
        ({"lm_head_bias": None}, "lm_head_bias must be the same"),
        ({"config": gk.GRPOConfig(epsilon_low=0.1)}, "config and other arguments must be the same"),
        ({"old_logps": None}, "config and other arguments must be the same"),
        ({"sampling_mask": make_mask()}, "config and other arguments must be the same"),
        (with_teacher, "config and other arguments must be the same"),
        ({"hidden": batch.hidden.clone().requires_grad_()}, "inputs that require gradients must be the same"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(**(changes if only_here else {}))
    known = make_top_k((6, 6), "renormalize")
    with pytest.raises(ValueError, match=r"rank 1 of the group refused|other ids than the TopKTeacher"):
        loss(config=distils, teacher=known, sampling_mask=make_mask() if only_here else known.sampling_mask)
    mine = sliced(batch, rank, group)
    for function in (gk.fused_distillation_loss, gk.fused_divergence):
        for changes, message in (
            (dict(divergence="jsd"), "config and other arguments must be the same"),
            (dict(lm_head_bias=None), "lm_head_bias must be the same"),
            (dict(divergence="no"), "divergence='no'" if only_here else "rank 1 of the group refused"),
            (dict(hidden=batch.hidden[0, 0]), r"expected .B, T" if only_here else "rank 1 of the group refused"),
        ):
            given = dict(hidden=mine.hidden, lm_head_weight=mine.weight, lm_head_bias=mine.bias, teacher=own)
            with pytest.raises(ValueError, match=message):
                function(**given | (changes if only_here else {}), vocab_parallel_group=group)
        with pytest.raises(TypeError, match="vocab_parallel_group is a str"):
            function(**given, divergence="no", vocab_parallel_group="tp")
    for k in (0, VOCAB + 1 if only_here else 3):
        with pytest.raises(ValueError, match=r"k=|rank 1 of the group refused|config and other arguments"):
            gk.fused_top_k(
                batch.hidden, batch.weight[rows_of(rank, 2)], k if only_here else 3, vocab_parallel_group=group
            )
    wrong = {"advantages": torch.ones(5)}
    with pytest.raises(ValueError, match="advantages has shape" if only_here else "rank 1 of the group refused"):
        loss(**(wrong if only_here else {}))
    mine, mask = sliced(batch, rank, group), make_mask()
    with pytest.raises(ValueError, match="config and other arguments must be the same"):
        gk.fused_logps(
            mine.hidden, mine.weight, mine.ids, vocab_parallel_group=group, sampling_mask=mask if only_here else None
        )
    with pytest.raises(ValueError, match="traced or compiled; it needs an eager one"):
        torch.compile(lambda: loss().loss, backend="eager")()
    compiled = torch.compile(gather_tokens, backend="eager")  # here, since each rank needs seconds to import dynamo
    assert torch.equal(compiled(batch.hidden, group), gather_tokens(batch.hidden, group))
    with pytest.raises(TypeError, match=r"vocab_parallel_group is a str; expected a torch\.distributed\.ProcessGroup"):
        loss(vocab_parallel_group="tp")
    with pytest.raises(ValueError, match=rf"completion_ids.*{VOCAB}"):
        loss(completion_ids=batch.ids.clone().fill_(VOCAB), completion_mask=None)
    assert loss().loss.isfinite()


WORK = {
    2: (
        equal_to_one_process,
        options_of_a_walk,
        equal_in_16_bits,
        logps_alone,
        teachers,
        k_ids,
        kept_ids_outside_of_the_vocabulary,
        sparse_gradients,
        accumulated,
        refusals,
        check_dtensors,
        *([linear_cross_entropy_of_verl] if find_spec("verl") else []),
    ),
    3: (equal_to_one_process, teachers, k_ids),
}


def all_of_it(rank: int, group) -> None:
    for work in WORK[group.size()]:
        work(rank, group)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WORK)
def test_slices(tmp_path, ranks):
    run_ranks(all_of_it, ranks, tmp_path)
    if ranks == 2 and not find_spec("verl"):
        pytest.skip("all but verl's function is tested; verl is not installed: run make test")
