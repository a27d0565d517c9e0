"""How many kernels a step would launch on a GPU, and how often it would wait for one: operations of torch, counted on a
CPU without views and without what only takes memory. A row operation of the compiled kernels is not seen."""

from __future__ import annotations

import pytest
import torch
from helpers import leaves, make_batch, off_policy, use_mask_path
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import grpo_kernels as gk
from grpo_kernels.head import chunk_size, k_ids, lm_head, loss_op, mask_paths

# They run no kernel; torch.where makes a tensor of a number on the host.
NO_KERNEL = (
    *("empty", "empty_strided", "empty_like", "_unsafe_view", "resize_", "set_"),
    *("scalar_tensor", "promote_types"),
)
READS = ("_local_scalar_dense", "nonzero", "masked_select", "tolist")  # the host waits
# Atomic additions, whose order no two runs share.
ATOMIC = ("index_add", "index_add_", "scatter_add", "scatter_add_", "bincount", "histc")


class LaunchRecorder(TorchDispatchMode):
    """What would be launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        is_view = any(x.alias_info and not x.alias_info.is_write for x in function._schema.returns)
        if not is_view and name not in NO_KERNEL:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """As on a GPU, which is not asked for what may be wrong in the data, and without the mode seen by the package."""
    for name in ("head.loss_op.check_values", "inputs.check_token_values", "head.mask_paths.check_allowed_ids"):
        monkeypatch.setattr(f"grpo_kernels.{name}", lambda *given: None)
    monkeypatch.setattr(chunk_size, "reads_block_host", lambda device: True)
    monkeypatch.setattr(loss_op, "uses_custom_op", lambda hidden, *given: False)
    monkeypatch.setattr(loss_op, "_compute", loss_op._compute.__wrapped__)
    monkeypatch.setitem(mask_paths.WIDTHS, "cpu", mask_paths.WIDTHS["cuda"])
    mask_paths._widths.cache_clear()
    read, launches = torch.Tensor.tolist, LaunchRecorder()

    def tolist(self):
        launches.names.append("tolist")
        return read(self)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    yield launches
    mask_paths._widths.cache_clear()


def step(launches, batch, preset, backend="cpu", **options):
    """What the loss with its gradients launches, then metrics where they are first read, then `backward`."""
    own, config, found = leaves(batch), gk.GRPOConfig.preset(preset, **options), []
    given = {name: x for name, x in own.options.items() if name != "ref_logps" or config.beta > 0}
    out = None

    def loss():
        nonlocal out
        tensors = own.hidden, own.weight, own.ids, own.advantages
        out = gk.fused_grpo_loss(*tensors, config=config, backend=backend, **given)

    for part in (loss, lambda: out.metrics, lambda: out.loss.backward(torch.tensor(2.0))):
        launches.names = []
        with launches:
            part()
        found.append(launches.names)
    return found


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("preset", "most"), [("grpo", 60), ("dapo", 60), ("cispo", 60), ("gspo", 100), ("vespo", 100)])
def test_a_step_of_one_chunk(launches, preset, most, static):
    """`static`: as with few tokens, of which none is left out, and no count is read."""
    loss, metrics, backward = step(launches, off_policy(make_batch(3, masked=True)), preset, static_shapes=static)
    assert len(loss) <= most, loss
    assert sum(name in READS for name in loss) == (not static), loss
    assert len(metrics) <= 60 and not any(name in READS for name in metrics), metrics
    assert not any(name in ATOMIC for name in loss + metrics)
    assert [name for name in backward if name != "_local_scalar_dense"] == ["mul_"] * 2, backward  # on a GPU: no read


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_16_bits_read_nothing(launches, backend):
    """Nor does what makes good the rounding at sampled ids: a CUDA graph can hold it."""
    batch = off_policy(make_batch(3, masked=True)).head_as(torch.bfloat16)
    loss, *_ = step(launches, batch, "dapo", backend, static_shapes=True, chunk_rows=8)
    assert not any(name in READS for name in loss), loss


def test_metrics_of_a_sampling_engine(launches):
    batch = off_policy(make_batch(3, masked=True))
    weights, most = torch.rand(4, 6) + 0.5, []
    for given in ({"rollout_weights": weights}, {"rollout_logps": -weights}, {"rollout_weights": weights[:, 0]}):
        _, metrics, _ = step(launches, batch.with_options(**{"rollout_logps": -weights, **given}), "dapo")
        assert not any(name in READS or name in ATOMIC for name in metrics), metrics
        most.append(len(metrics))
    assert max(most) <= 150, metrics


def test_allowed_ids(launches, monkeypatch):
    """Tokens with a sampling mask: one read, and few operations for each matrix of kept ids."""
    use_mask_path(monkeypatch, "gathers", 90)
    batch, found = off_policy(make_batch(3, sequences=2, length=4, vocab=90)), []
    for most in (40, 80):  # one matrix has room for them and the sampled id, or two
        mask = gk.SamplingMask.from_lists([[range(most - 30 * t) for t in range(2)] * 2] * 2)
        loss, *_ = step(launches, batch.with_options(sampling_mask=mask), "dapo")
        assert sum(name in READS for name in loss) == 1, loss
        assert not any(name in ("mm", "addmm", "addmm_") for name in loss)
        found.append(len(loss))
    assert found[0] <= 60, loss
    assert found[1] - found[0] <= 5, loss


@pytest.mark.parametrize(("bias", "most"), [(None, 80), (torch.empty(151_936, device="meta"), 120)])
def test_the_likeliest_ids_of_a_chunk_on_a_gpu(bias, most):
    """K = 100 of 2,048 rows; a bias is added to a part of the logits at a time, and searched with all of them."""
    logits = torch.empty(2048, 151_936, device="meta")
    with LaunchRecorder() as recorder:
        assert k_ids.top_k(logits, bias, 100).shape == (2048, 100)
    assert len(recorder.names) <= most


@pytest.mark.parametrize(("masked", "most"), [(False, 10), (True, 14)], ids=["range", "list"])
def test_a_chunk_of_exponentials(launches, monkeypatch, emulated, masked, most):
    """What one chunk more launches on Hopper, kernels of CUDA among it. A list of tokens is gathered from."""
    product = lm_head.product

    def one_product(a, b):  # as a GPU has it
        launches.names.append("product")
        with _disable_current_modes():
            return product(a, b)

    monkeypatch.setattr(lm_head, "product", one_product)
    batch, found = off_policy(make_batch(3, masked=masked, vocab=72)).head_as(torch.bfloat16), []
    for rows in (6, 3):
        emulated.use()
        loss, *_ = step(launches, batch, "dapo", "cuda", chunk_rows=rows, logits_dtype=torch.float32)
        found.append((loss.count("product"), len(loss) + emulated.launches()))
    (few, before), (many, after) = found
    assert many > few > 1
    assert after - before <= most * (many - few), loss
