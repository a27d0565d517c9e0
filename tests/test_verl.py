"""The integration beside verl 0.9.1 itself: its registry, its vanilla loss, its module of kernels.

A weight that is split over ranks: test_vocab_parallel.py.
"""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
import torch
import verl_package
from verl_package import ActorConfig as Actor

from grpo_kernels import GRPOConfig, fused_logps
from grpo_kernels.head import mask_paths

B, T, H, V = 5, 8, 16, 64
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.fixture
def verl(monkeypatch):
    return verl_package.install(monkeypatch)


@pytest.fixture
def core(verl):
    return importlib.import_module("verl.trainer.ppo.core_algos")


def arguments() -> dict:
    torch.manual_seed(2)
    mask = torch.arange(T) < torch.tensor([8, 3, 5, 1, 0])[:, None]  # a row is masked altogether
    logps = -3 + 0.5 * torch.randn(B, T)
    return dict(
        old_log_prob=logps + 0.6 * torch.randn(B, T), log_prob=logps, advantages=torch.randn(B, T), response_mask=mask
    )


def run(loss, given, **options):
    leaf = given["log_prob"].clone().requires_grad_()
    value, metrics = loss(**{**given, "log_prob": leaf}, **options)
    value.backward()
    return value.detach(), leaf.grad, metrics


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_vanilla(verl, core, mode):
    """Alone, on four ranks, with a scale factor; with importance weights of the rollout and without."""
    verl.register()
    given = arguments()
    infos = {}, dict(dp_size=4, batch_num_tokens=70, global_batch_size=16), dict(loss_scale_factor=100)
    for info, weights in itertools.product(infos, (None, torch.rand(B, T) + 0.5)):
        options = dict(loss_agg_mode=mode, config=Actor(**info), rollout_is_weights=weights)
        loss, gradient, metrics = run(core.get_policy_loss_fn("vanilla"), given, **options)
        own_loss, own_gradient, own_metrics = run(core.get_policy_loss_fn("grpo_kernels"), given, **options)
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-5, atol=1e-7)
        assert own_metrics == pytest.approx(metrics, rel=1e-5)
        assert gradient.abs().max() > 1e-4 and metrics["actor/pg_clipfrac_lower"] > 0


DPPO = dict(dppo_kl_tau=0.0, ratio_cap=1.5, log_ratio_clamp=20.0)
OTHERS = {  # verl's name -> options, clip_ratio_low and clip_ratio_high
    "gspo": (dict(importance_sampling_level="sequence_token"), 0.2, 0.28),
    "cispo": (dict(surrogate="cispo_two_sided"), 0.2, 0.28),
    "dppo_tv": (dict(surrogate="dppo_tv", **DPPO), 0.01, 0.02),
    "dppo_kl": (dict(surrogate="dppo_kl", **DPPO), 0.002, 0.003),
    "gpg": (dict(surrogate="reinforce"), None, None),
    "sapo": (dict(surrogate="sapo"), None, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_has_verls_aggregation(verl, core, name):
    kind, low, high = OTHERS[name]
    verl.register("ours", GRPOConfig(**kind, **({} if low is None else dict(epsilon_low=low, epsilon_high=high))))
    actor = Actor()
    actor.clip_ratio_low, actor.clip_ratio_high = low, high
    actor.tau_pos, actor.tau_neg = 1.0, 1.05
    given, options = arguments(), dict(loss_agg_mode="seq-mean-token-mean", config=actor)
    loss, gradient, _ = run(core.get_policy_loss_fn(name), given, **options)
    own_loss, own_gradient, _ = run(core.get_policy_loss_fn("ours"), given, **options)
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-4, atol=1e-7)


def test_linear_cross_entropy_is_replaced_wherever_it_was_imported(verl):
    kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    original = kernel.linear_cross_entropy
    other = verl_package.stand_in("verl.models.mcore.model_forward_fused", linear_cross_entropy=original)
    sys.modules[other.__name__] = other
    try:
        verl.register()
        verl.register()
        assert kernel.linear_cross_entropy is other.linear_cross_entropy is verl.linear_cross_entropy is not original
    finally:
        del sys.modules[other.__name__]


@pytest.mark.parametrize("shape", [(1, 12), (3, 4)])
def test_linear_cross_entropy(verl, shape):
    """The call of verl's forwards: positional, hidden of a packed batch (1, N, H), a temperature, no reduction."""
    verl.register()
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    hidden, weight = torch.randn(*shape, H), 0.5 * torch.randn(V, H)
    labels = torch.randint(V, shape)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    logps, entropy = function(*leaves, labels, 0.7, "none")
    assert logps.shape == entropy.shape == (12,) and logps.dtype == torch.float32
    (logps.sum() + 0.1 * entropy.sum()).backward()
    right = [x.double().requires_grad_() for x in (hidden, weight)]
    z = (right[0] @ right[1].T / 0.7).log_softmax(-1)
    expected = z.gather(-1, labels[..., None]).flatten(), -(z.exp() * z).sum(-1).flatten()
    (expected[0].sum() + 0.1 * expected[1].sum()).backward()
    torch.testing.assert_close((logps.double(), entropy.double()), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close([x.grad.double() for x in leaves], [x.grad for x in right], rtol=1e-4, atol=1e-5)
    _, total = function(hidden, weight, labels, 0.7, "sum")
    torch.testing.assert_close(total.double(), expected[1].sum().detach(), rtol=1e-5, atol=1e-5)
    per_token = torch.full(shape, 0.7)
    torch.testing.assert_close(function(hidden, weight, labels, per_token)[0], logps.detach())


@pytest.mark.parametrize("implementation", ["torch", "liger"])
@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_fused_linear_for_ppo(verl, shape, implementation):
    """The layer of impl_backend=torch, verl's default, and liger, called as verl's forwards call it."""
    layer = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO
    hidden, weight, labels = torch.randn(*shape, H), 0.5 * torch.randn(V, H), torch.randint(V, shape)

    def call(implementation) -> tuple:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logps, entropy = layer(impl_backend=implementation).forward(
            hidden_states=leaves[0], vocab_weights=leaves[1], input_ids=labels, temperature=0.7
        )
        return logps, entropy, *torch.autograd.grad((logps * 0.3 + 0.1 * entropy).sum(), leaves)

    expected = call("torch")
    verl.register()
    found = call(implementation)
    assert layer.forward.__module__ == verl.__name__ and found[0].shape == shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_sparse_gradients(verl, monkeypatch):
    monkeypatch.setattr(mask_paths, "DENSE_LOGITS_PER_GATHERED_ID", {"cpu": 1, "cuda": 1})
    hidden, labels, found = torch.randn(12, H), torch.randint(V, (12,)), []
    for theta in (None, 0.1, None):
        verl.register(sparse_backward=theta)
        weight = torch.linspace(-1.0, 1.0, V * H).view(V, H).requires_grad_()
        verl.linear_cross_entropy(hidden, weight, labels)[0].sum().backward()
        found.append(weight.grad)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    for option in ({"sparse_backward": 0.1}, {"logits_dtype": torch.float32}):
        with pytest.raises(
            ValueError, match=f"{next(iter(option))} has no effect in verl's policy loss; give it to register"
        ):
            verl.register(config=GRPOConfig(**option))


def test_the_type_of_logits(verl):
    hidden, weight, labels = torch.randn(12, H).bfloat16(), torch.randn(V, H).bfloat16(), torch.randint(V, (12,))
    for dtype in (torch.float32, torch.bfloat16):
        verl.register(logits_dtype=dtype)
        found, _ = verl.linear_cross_entropy(hidden, weight, labels)
        assert torch.equal(found, fused_logps(hidden, weight, labels, logits_dtype=dtype)[0])
    verl.register()


def test_what_does_not_fit_is_refused_by_name(verl):
    given = arguments()
    for changes, error, message in (
        (dict(loss_agg_mode="mean"), ValueError, "loss_agg_mode='mean'; expected one of token-mean, token-sum"),
        (dict(config=None), ValueError, "config is None; expected verl's ActorConfig"),
        (
            dict(old_log_prob=given["old_log_prob"].clone().requires_grad_()),
            ValueError,
            "old_log_prob requires a gradient",
        ),
        (dict(response_mask=None), TypeError, r"response_mask is a NoneType; expected a torch\.Tensor"),
        (dict(advantages=given["advantages"][:, 0]), ValueError, r"advantages has shape \(5,\); expected \(5, 8\)"),
    ):
        with pytest.raises(error, match=message):
            verl.policy_loss(**{**given, "config": Actor(), **changes})
    with pytest.raises(ValueError, match=r"batch_num_tokens is None in config.global_batch_info"):
        verl.policy_loss(**given, loss_agg_mode="token-mean", config=Actor(dp_size=2))
    with pytest.raises(ValueError, match="reduction='max'; expected one of none, sum, mean"):
        verl.linear_cross_entropy(torch.zeros(2, H), torch.zeros(V, H), torch.zeros(2).long(), 1.0, "max")
    with pytest.raises(ValueError, match=r"config\.entropy_coef=0\.1: verl's policy losses"):
        verl.register(config=GRPOConfig(entropy_coef=0.1))
    with pytest.raises(TypeError, match=r"config is a builtins\.str; expected a grpo_kernels"):
        verl.register(config="dapo")
