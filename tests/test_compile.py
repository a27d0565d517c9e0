"""torch.compile in one graph, dynamic shapes; what is refused."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as forward_ad
import torch.fx.experimental.proxy_tensor
from helpers import Batch, good_calls, leaves, make_batch, off_policy
from teachers import KINDS, OWN, teacher_of
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import grpo_kernels as gk


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(step, batch: Batch, **given):
    """loss, gradients and logps of step(hidden, weight, bias)."""
    leaves = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
    loss, logps = step(*leaves, **given)
    loss.backward()
    return loss.detach(), logps.detach(), *(x.grad for x in leaves)


def assert_equal_runs(step, batch: Batch, compiler: str, **given):
    expected = run(step, batch, **given)
    found = run(torch.compile(step, fullgraph=True, backend=compiler), batch, **given)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)
    assert all(x.any() for x in expected)


FUNCTIONS = [name for name in good_calls() if name != "fused_top_k" and ("fused" in name or "loss" in name)]
CONFIGS = {
    "grpo": gk.GRPOConfig(beta=0.1, aggregation="seq_mean"),
    "gspo": gk.GRPOConfig(importance_sampling_level="sequence", chunk_rows=7),
    "tensor options": gk.GRPOConfig(
        temperature=torch.full((4, 6), 0.8), entropy_threshold=torch.tensor(3.0), entropy_coef=torch.tensor(0.05)
    ),
}


def loss_of(batch: Batch, hidden, weight, bias, **given):
    return gk.fused_grpo_loss(hidden, weight, batch.ids, lm_head_bias=bias, **given, **batch.options)


ENTROPY = {
    "loss": dict(entropy_aggregation="loss", entropy_coef=torch.tensor(0.1)),
    "token_mean": dict(entropy_aggregation="token_mean", entropy_coef=torch.tensor([0.1])),
    "kept_only": dict(entropy_kept_only=True, entropy_threshold=torch.tensor(3.0), entropy_coef=torch.tensor(0.1)),
    "kept_only, a number": dict(entropy_kept_only=True, entropy_threshold=3.0, entropy_coef=torch.tensor(0.1)),
}


@pytest.mark.parametrize("name", ENTROPY)
def test_options_that_need_a_tensor(name):
    """What an operator receives as text has no tensors, and is not checked again; the results are those of numbers."""
    batch, tensors = off_policy(make_batch(1, bias=True, masked=True)), gk.GRPOConfig(**ENTROPY[name])
    numbers = gk.GRPOConfig(**{n: x.item() if isinstance(x, torch.Tensor) else x for n, x in ENTROPY[name].items()})

    def step(*leaves, config=tensors):
        out = loss_of(batch, *leaves, advantages=batch.advantages, config=config)
        return out.loss, out.logps

    assert_equal_runs(step, batch, "aot_eager")
    assert torch.allclose(run(step, batch)[0], run(step, batch, config=numbers)[0], rtol=1e-6)
    logps, entropy = gk.fused_logps(batch.hidden, batch.weight, batch.ids, lm_head_bias=batch.bias, entropy=True)
    found, expected = (
        gk.grpo_loss_from_logps(logps, batch.advantages, entropy=entropy, config=config, **batch.options).loss
        for config in (tensors, numbers)
    )
    assert torch.allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "cpu") for name in CONFIGS), ("grpo", "torch"), ("grpo", "triton"), ("grpo", "cuda")]
)
def test_fused_grpo_loss(name, backend):
    """With advantages, and with rewards."""
    batch = off_policy(make_batch(1, bias=True, masked=True))
    more = {"entropy_normalizer": torch.tensor(20.0)} if name == "tensor options" else {}

    def step(*leaves, **given):
        out = loss_of(batch, *leaves, config=CONFIGS[name], backend=backend, **given)
        return 2 * out.loss, out.logps

    assert_equal_runs(step, batch, "aot_eager", advantages=batch.advantages, **more)
    if backend == "cpu":
        rewards = torch.tensor([0.0, 1.0, 0.2, 0.7])
        assert_equal_runs(step, batch, "aot_eager", rewards=rewards, num_generations=2, **more)


def beside_the_loss(batch, teacher, *leaves):
    """With its metrics."""
    config = gk.GRPOConfig(distill_coef=0.7, divergence="jsd")
    out = loss_of(batch, *leaves, advantages=batch.advantages, teacher=teacher, config=config)
    return 2 * out.loss + sum(x for key, x in out.metrics.items() if key.startswith("divergence")), out.divergence


def beside_under_autocast(batch, teacher, *leaves):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return beside_the_loss(batch, teacher, *leaves)


def alone(batch, teacher, hidden, weight, bias):
    mask = batch.options["completion_mask"]
    out = gk.fused_distillation_loss(hidden, weight, teacher, lm_head_bias=bias, completion_mask=mask)
    return out.loss, out.divergence


def per_token(batch, teacher, hidden, weight, bias):
    given = dict(lm_head_bias=bias, completion_mask=batch.options["completion_mask"])
    found = gk.fused_divergence(hidden, weight, teacher, divergence="jsd", divergence_beta=0.3, **given)
    return (found.sin() * torch.arange(6)).sum(), found


TEACHER_STEPS = (beside_the_loss, beside_under_autocast, alone, per_token)


@pytest.mark.parametrize(
    ("kind", "step"),
    [  # all steps with one kind, one with each other kind
        (kind, step)
        for (i, kind), (j, step) in itertools.product(enumerate((*KINDS, *OWN)), enumerate(TEACHER_STEPS))
        if i == 0 or (i + j) % 4 == 1
    ],
)
def test_a_teacher(kind, step):
    batch, teacher = off_policy(make_batch(1, bias=True, masked=True)), teacher_of(kind, shape=(4, 6))
    assert_equal_runs(lambda *leaves: step(batch, teacher, *leaves), batch, "aot_eager")


def test_a_renormalized_teacher_alone_is_refused():
    batch, teacher = off_policy(make_batch(1, bias=True, masked=True)), teacher_of("renormalize", shape=(4, 6))
    with pytest.raises(Exception, match=r"(?s)teacher has mode 'renormalize'.*outside of torch\.compile|ValueError"):
        torch.compile(alone, backend="eager", fullgraph=True)(batch, teacher, batch.hidden, batch.weight, batch.bias)


def through_metrics(batch, hidden, weight, bias):
    out = loss_of(batch, torch.tanh(hidden), weight, bias, advantages=batch.advantages)
    return out.loss * 2 + out.metrics["entropy"], out.logps


def under_autocast(batch, hidden, weight, bias):
    """Float32 leaves get float32 gradients of products in bfloat16, compiled or not."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = loss_of(batch, hidden, weight, bias, advantages=batch.advantages)
        logps, _ = gk.fused_logps(hidden, weight, batch.ids, lm_head_bias=bias)
    return out.loss + 0.1 * logps.mean(), out.logps


def config_inside_the_graph(batch, *leaves):
    config = gk.GRPOConfig(beta=0.1, epsilon_high=0.3, delta=1.2)
    out = loss_of(batch, *leaves, advantages=batch.advantages, config=config)
    return out.loss, out.logps


def teacher_inside_the_graph(batch, *leaves):
    """Its hidden states are those of each step."""
    teacher = gk.Teacher(batch.hidden.flip(0), batch.weight.flip(1), top_k=5)
    out = loss_of(batch, *leaves, advantages=batch.advantages, teacher=teacher, config=gk.GRPOConfig(distill_coef=0.5))
    return out.loss, out.divergence


def log_probabilities(batch, hidden, weight, bias):
    mask = batch.options["completion_mask"]
    logps, entropy = gk.fused_logps(hidden, weight, batch.ids, lm_head_bias=bias, completion_mask=mask, entropy=True)
    return (logps * entropy).sum(), logps


def k_log_probabilities(batch, hidden, weight, bias):
    """Of the likeliest ids, which are found in the same graph."""
    given = dict(lm_head_bias=bias, completion_mask=batch.options["completion_mask"])
    ids, found = gk.fused_top_k(hidden, weight, 5, **given)
    logps, entropy = gk.fused_logps(hidden, weight, ids, entropy=True, **given)
    return (logps.exp() * (logps - 2 * found)).sum() + entropy.sum(), logps


def loss_from_logps(batch, hidden, weight, bias):
    logps = (hidden @ weight.T + bias).log_softmax(-1).gather(-1, batch.ids[..., None])[..., 0]
    config = gk.GRPOConfig(sparse_backward=2**-6)  # without effect here, on the sums too
    out = gk.grpo_loss_from_logps(logps, batch.advantages, config=config, **batch.options)
    return out.loss, logps


@pytest.mark.parametrize(
    ("step", "compiler"),
    [
        (under_autocast, "aot_eager"),
        (config_inside_the_graph, "aot_eager"),
        (teacher_inside_the_graph, "aot_eager"),
        (log_probabilities, "aot_eager"),
        (k_log_probabilities, "aot_eager"),
        (loss_from_logps, "aot_eager"),
        (through_metrics, "inductor"),
    ],
)
def test_other_steps(step, compiler):
    batch = off_policy(make_batch(1, bias=True, masked=True))
    assert_equal_runs(lambda *leaves: step(batch, *leaves), batch, compiler)


COMPILED = ("fused_grpo_loss", "fused_logps", "grpo_loss_from_logps")  # what is a custom operator there


@pytest.mark.parametrize(
    ("name", "compiler"), [*((name, None) for name in FUNCTIONS), *itertools.product(COMPILED, ("eager", "aot_eager"))]
)
def test_results_may_be_changed_in_place(name, compiler):
    """As those of an eager expression; what the backward kept of them stays as it was."""
    given = good_calls()[name]
    first = next(iter(given))

    def function(x):
        found = getattr(gk, name)(**given | {first: x})
        return found if isinstance(found, tuple) else (getattr(found, "loss", found),)

    def gradient(results, change):
        x = given[first].clone().requires_grad_()
        results = results(x)
        scales = [torch.linspace(0, 2, max(2, r.numel()))[-r.numel() :].view(r.shape) for r in results]
        sum(change(r, scale).sum() for r, scale in zip(results, scales, strict=True)).backward()
        return x.grad

    changed = function if compiler is None else torch.compile(function, backend=compiler)
    expected = gradient(function, torch.Tensor.mul)
    assert torch.equal(gradient(changed, torch.Tensor.mul_), expected) and expected.any()


class Watching(TorchDispatchMode):
    """A mode of a user's own, which wants to see every operation."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def saving_everything():
    """Selective checkpointing: results of the forward are kept, and given out in the recomputation."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dispatch_modes_change_nothing(name):
    function, x = of_first(name)

    def gradient(step=function, mode=nullcontext):
        own = x.clone().requires_grad_()
        with mode():
            loss = step(own)
            loss.backward()
        return loss.detach(), own.grad

    def checkpointed(own):  # exp keeps its result, so that the backward computes everything again
        return checkpoint(lambda own: function(own).exp(), own, use_reentrant=False, context_fn=saving_everything).log()

    found = [
        gradient(mode=Watching),
        gradient(mode=lambda: FlopCounterMode(display=False)),
        gradient(checkpointed),
    ]
    expected = gradient()
    for loss, grad in found:
        assert torch.allclose(loss, expected[0]) and torch.allclose(grad, expected[1], rtol=1e-4) and grad.any()


ONE_OPERATOR = [name for name in FUNCTIONS if name not in ("grpo_loss_from_logits", "fused_policy_loss")]


def without_group_ids(name: str) -> dict:
    """A good call, but for the ids of groups, whose number decides shapes."""
    return {key: x for key, x in good_calls()[name].items() if key != "group_ids"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fake_tensors_have_shapes_alone(name):
    """No check reads their values, and no kernel their memory."""
    with FakeTensorMode():  # the inputs are made in it, too
        given = without_group_ids(name)
        first = next(iter(given))
        x = given[first] = given[first].clone().requires_grad_()
        if name in ONE_OPERATOR:
            found = getattr(gk, name)(**given)
            found = getattr(found, "loss", found)
            (found[0] if isinstance(found, tuple) else found).sum().backward()
            assert x.grad.shape == x.shape
        else:
            with pytest.raises(ValueError, match=f"^{name} is given to a call that is traced or compiled"):
                getattr(gk, name)(**given)


def test_a_buffer_of_a_traced_call_is_refused_as_such():
    with FakeTensorMode():
        given = without_group_ids("fused_grpo_loss")
        total = torch.zeros_like(given["lm_head_weight"].requires_grad_())
        with pytest.raises(ValueError, match=r"^accumulate_into is given to a call that is traced or compiled"):
            gk.fused_grpo_loss(**given, accumulate_into=total)


def test_functions_beside_the_loss_compile_too():
    """While a function is compiled there is no data for their checks to look at."""
    x, mask = torch.rand(4, 5), torch.rand(4, 5) < 0.7
    packed = dict(cu_seqlens=torch.arange(5) * 5, config=gk.GRPOConfig(temperature=torch.rand(4) + 0.5))
    hidden, weight, ids = torch.rand(20, 3), torch.rand(7, 3), torch.zeros(20, dtype=torch.int64)
    functions = (
        lambda: gk.entropy_quantile(x, mask),
        lambda: gk.rollout_weights(x, x * 1.1, completion_mask=mask, level="sequence", batch_normalize=True),
        lambda: gk.rejection_mask(x, x * 1.1, {"token_k1": (0.97, 1.1), "seq_max_k3": 0.1}, completion_mask=mask),
        lambda: gk.group_advantages(x[:, 0], num_generations=2),
        lambda: gk.process_advantages(x[:, :3], torch.tensor([[0, 1, 4]] * 4), 5, num_generations=2),
        lambda: gk.fused_grpo_loss(hidden, weight, ids, x[:, 0], **packed).loss,
    )
    for function in functions:
        found = torch.compile(function, fullgraph=True, backend="aot_eager")()
        assert torch.allclose(found, function(), rtol=1e-5)


def test_new_shapes_do_not_recompile_every_time():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(hidden, weight, ids, advantages):
        return gk.fused_grpo_loss(hidden, weight, ids, advantages).loss

    for length in (5, 6, 7, 9, 12):
        batch = make_batch(1, length=length)
        leaf = batch.hidden.clone().requires_grad_()
        found = step(leaf, batch.weight, batch.ids, batch.advantages)
        found.backward()
        assert torch.allclose(found, gk.fused_grpo_loss(leaf, batch.weight, batch.ids, batch.advantages).loss)
    assert counter.frame_count <= 2


BATCH = off_policy(make_batch(1))
NUMBERS = {  # a call with a number, which dynamo takes for a variable from its second value on
    "temperature": lambda hidden, weight, x: gk.fused_logps(hidden, weight, BATCH.ids, temperature=0.1 * x)[0],
    "k": lambda hidden, weight, x: gk.fused_top_k(hidden, weight, x)[1].sum(-1),
    "cap": lambda hidden, weight, x: gk.rollout_weights(hidden[..., 0] - 5, weight[:4, :6] - 5, cap=0.3 * x),
    "bound": lambda hidden, weight, x: gk.rejection_mask(hidden[..., 0] - 5, weight[:4, :6] - 5, {"token_k2": 0.1 * x}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change(name):
    function = NUMBERS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = [compiled(BATCH.hidden, BATCH.weight, x) for x in (3, 5, 6)]
    for x, found in zip((3, 5, 6), results, strict=True):
        torch.testing.assert_close(found, function(BATCH.hidden, BATCH.weight, x))
    assert not torch.equal(results[0], results[1])


# --- functorch, forward-mode AD and second derivatives: refused, never a derivative that is silently 0 ----------------


def of_first(name: str):
    """A public function as one from its first argument to a number; that argument."""
    given = good_calls()[name]
    first = next(iter(given))

    def function(x):
        found = getattr(gk, name)(**given | {first: x})
        found = found.mass if isinstance(found, gk.SamplingMask) else getattr(found, "loss", found)
        return (found[0] if isinstance(found, tuple) else found).sum()

    return function, given[first]


TRANSFORMS = {
    "grad": lambda f, x: func.grad(f)(x),
    "jvp": lambda f, x: func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "vmap": lambda f, x: func.vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, "fused_top_k", "sampling_support"])
def test_transforms_and_second_derivatives_are_refused_by_name(name):
    function, x = of_first(name)
    for transform in TRANSFORMS.values():
        with pytest.raises(RuntimeError, match=rf"grpo_kernels\.{name} .*torch\.func.*grpo_kernels\.reference"):
            transform(function, x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=rf"grpo_kernels\.{name} .*forward-mode AD.*grpo_kernels\.reference"):
            function(dual)
        assert function(x).isfinite()  # no dual input
    if name not in FUNCTIONS:
        return
    leaf = x.clone().requires_grad_()
    inner = name.replace("distillation", "grpo")  # which computes it
    with pytest.raises(RuntimeError, match=rf"grpo_kernels\.{inner} has no second derivative"):
        torch.autograd.grad(function(leaf), leaf, create_graph=True)


def test_accumulate_into_of_a_compiled_call_is_refused_by_name():
    batch = leaves(BATCH)
    total = torch.zeros_like(batch.weight)

    def loss(hidden, weight):
        return gk.fused_grpo_loss(hidden, weight, batch.ids, batch.advantages, accumulate_into=total).loss

    # The dynamo of torch 2.8 names the type of the error and the line that raised it, and leaves its text out.
    text = "accumulate_into is given to a call that is traced or compiled|ValueError.*accumulate_into=total"
    with pytest.raises(Exception, match=f"(?s){text}"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(batch.hidden, batch.weight)


@pytest.mark.parametrize("argument", ["lm_head_weight", "lm_head_bias"])
def test_a_dual_weight_or_bias_is_refused(argument):
    head = {"lm_head_weight": BATCH.weight, "lm_head_bias": torch.zeros(len(BATCH.weight))}
    with forward_ad.dual_level():
        head[argument] = forward_ad.make_dual(head[argument], torch.ones_like(head[argument]))
        with pytest.raises(RuntimeError, match=r"fused_logps .*forward-mode"):
            gk.fused_logps(BATCH.hidden, completion_ids=BATCH.ids, **head)


def test_a_transform_inside_a_compiled_function_is_refused_too():
    function, x = of_first("fused_grpo_loss")
    with pytest.raises(RuntimeError, match=r"grpo_kernels\.fused_grpo_loss .*torch\.func"):
        torch.compile(lambda x: func.jvp(function, (x,), (x,)), backend="aot_eager")(x)
