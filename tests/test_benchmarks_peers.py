"""Implementations are right or refused with a sentence, whatever is installed; tables and pictures of results."""

from __future__ import annotations

import re
from importlib.util import find_spec
from unittest import mock

import pytest
import report
import torch
from accelerate.state import AcceleratorState
from tiny_models import tiny_model

from grpo_kernels.commands.bench import figures, peers, samples
from grpo_kernels.commands.bench.baselines import Unsupported
from grpo_kernels.commands.bench.cases import MODES, WHOLES, make_case
from grpo_kernels.commands.bench.inputs import make_inputs, skewed_counts
from grpo_kernels.commands.bench.reference import errors, off_policy, reference, why_wrong
from grpo_kernels.commands.bench.table import IMPLEMENTATIONS, select
from grpo_kernels.integrations import trl as trl_integration

CPU = torch.device("cpu")
PEERS = ("trl", "liger", "liger-native", "verl", "verl-torch", "cut-cross-entropy", "quack")
SERVE = {"floor", "eager", "compiled", "ours", "ours-torch"}  # wherever torch runs
OF_EARLIER_REVISION = {"time-to-reward.png", "gpu-memory.png"}


def inputs_of(mode, shape="32x128x160", dtype="float32", **options):
    return off_policy(make_inputs(make_case(shape, dtype, mode=mode, **options), CPU))


def error_of(name, inputs, mode, objective):
    """Why the result is wrong, if it is."""
    result, right = IMPLEMENTATIONS[name].step(inputs, mode)(inputs), reference(inputs, mode, objective)
    for given, like in ((result.dhidden, inputs.hidden), (result.dweight, inputs.weight)):
        assert given is None or (given.numel(), given.dtype) == (like.numel(), like.dtype)
    assert mode != "frozen" or result.dweight is None
    return why_wrong(right, result, errors(right, result), inputs.hidden.dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_each_is_right_or_refused_with_a_sentence(name, mode):
    """Where a peer calls torch.compile it is run as written: Liger's loss would take 20 s."""
    objective = IMPLEMENTATIONS[name].objective
    stance = "default" if (name, mode) == ("compiled", "step") else "force_eager"
    try:
        with torch.compiler.set_stance(stance):
            wrong = error_of(name, inputs_of(mode), mode, "grpo" if objective == "none" else objective)
        assert wrong is None or objective == "none" or IMPLEMENTATIONS[name].estimate
    except Unsupported as unsupported:
        reason = str(unsupported)
        assert len(reason.split()) > 2 and "\n" not in reason and name not in SERVE


@pytest.mark.parametrize("mode", WHOLES)
def test_whole_models_take_a_step(mode, monkeypatch):
    """TRL's trainer computes the same loss with and without this package, which is called where it says so."""
    calls = []
    for function in ("fused_logps", "fused_grpo_loss"):
        original = getattr(trl_integration, function)
        monkeypatch.setattr(
            trl_integration, function, lambda *a, original=original, **k: calls.append(1) or original(*a, **k)
        )
    AcceleratorState._reset_state(reset_partial_state=True)
    inputs, losses, tokens = inputs_of(mode, "64x64x512", generations=8), [], []
    for name in WHOLES[mode]:
        if name == "vllm" and find_spec("vllm") is None:
            with pytest.raises(Unsupported, match="pip install vllm"):
                IMPLEMENTATIONS[name].step(inputs, mode)
            continue
        step = IMPLEMENTATIONS[name].step(inputs, mode)
        calls.clear()
        loss, *_, metrics = [step(inputs) for _ in range(2)][1]
        assert bool(calls) == (name in ("ours-patch_trl", "ours-trainer"))
        losses += [] if loss is None else [loss.item()]
        tokens += [] if metrics is None else [metrics["sampling/tokens"].item()]
    assert losses == ([] if mode != "trainer" else [pytest.approx(losses[0], abs=1e-5)] * 3)
    assert set(tokens) == ({64} if mode == "sampling" else set())
    with pytest.raises(Unsupported, match=f"has no mode {mode}"):
        IMPLEMENTATIONS["ours"].step(inputs, mode)


def test_names_are_selected_by_patterns_in_the_order_of_the_table():
    names = list(IMPLEMENTATIONS)
    assert select(["*"]) == names and set(PEERS) <= set(names)
    assert select(["eager", "floor"]) == ["floor", "eager"]
    assert select(["ours*", "ours"]) == [name for name in names if name.startswith("ours")]
    assert select(("ours*", "eager"), without=("ours-*",)) == ["ours", "eager"]
    with pytest.raises(ValueError, match="'none-such' is no implementation; there are ours, "):
        select(["ours", "none-such"])


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (ModuleNotFoundError("No module named 'x'"), "not installed (No module named 'x'): pip install "),
        (ImportError("libpeer.so: no such file"), "cannot be imported: ImportError: libpeer.so: no such file"),
        (RuntimeError("wrong version\nof everything"), "cannot be imported: RuntimeError: wrong version"),
    ],
)
def test_missing_and_broken_packages_are_reasons(monkeypatch, error, start):
    """On what looks like a Hopper GPU, so that nothing else is a reason."""
    monkeypatch.setattr(peers, "need_nvidia", lambda *needed: (9, 0))
    monkeypatch.setattr(peers, "importlib", mock.Mock(**{"import_module.side_effect": error}))
    monkeypatch.setattr(peers, "_load_verl", mock.Mock(side_effect=error))
    for name in PEERS:
        with pytest.raises(Unsupported, match=re.escape(start)) as refused:
            IMPLEMENTATIONS[name].make_step(inputs_of("step", dtype="bfloat16"), "step")
        assert "\n" not in str(refused.value)


def test_a_gpu_has_to_be_there_and_new_enough(monkeypatch):
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        IMPLEMENTATIONS["quack"].make_step(inputs_of("step"), "step")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    on_gpu = mock.Mock(**{"hidden.is_cuda": True})
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0, this is 8\.6"):
        peers.need_nvidia(on_gpu, (9, 0))
    assert peers.need_nvidia(on_gpu, (8, 6)) == (8, 6)


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_sampling_masks_in_eager_ours_and_the_exact_result(mode, share):
    inputs = inputs_of(mode, "64x32x512", length=4, kept_ids=7, masked_share=share)
    mask = inputs.sampling_mask
    assert mask.counts.flatten().tolist().count(7) == 64 * share
    sampled = inputs.ids.flatten()[mask.counts.flatten() > 0]
    assert (mask.ids.view(-1, 7) == sampled[:, None]).any(1).all()
    wrong = {name: error_of(name, inputs, mode, "grpo") for name in ("ours", "eager", "ours-unmasked")}
    assert wrong["ours"] is None and wrong["eager"] is None and wrong["ours-unmasked"] is not None


def statistics(counts):
    """Mean, median, 99th percentile, share of single ones."""
    counts = counts.flatten().double()
    last = counts.kthvalue(-(-99 * len(counts) // 100)).values
    return counts.mean().item(), counts.median().item(), last.item(), (counts == 1).double().mean().item()


@pytest.mark.parametrize("tokens", [256, 2048, 4095, 16384])
def test_skewed_counts_have_the_loads_that_a_peer_published(tokens):
    mean, median, last, single = statistics(skewed_counts(tokens, 8))
    assert (mean, median, last) == (8, 2, 82) and 0.45 <= single <= 0.48


def test_a_skewed_mask_keeps_that_many_distinct_ids_of_each_token_with_the_sampled_one():
    inputs = inputs_of("step", "2048x16x1024", kept_ids=8, skewed=True)
    mask, ids = inputs.sampling_mask, inputs.ids.flatten()
    assert statistics(mask.counts)[:3] == (8, 2, 82)
    each = mask.ids.split(mask.counts.flatten().tolist())
    assert all((kept.diff() > 0).all() and token in kept for kept, token in zip(each, ids, strict=True))
    assert int(mask.ids.min()) >= 0 and int(mask.ids.max()) < 1024
    assert mask.counts.flatten()[:1024].double().mean() == pytest.approx(8, rel=0.5), "in no order"
    assert error_of("ours", inputs, "step", "grpo") is None


@pytest.mark.parametrize("entropy", [0.5, 1.0, 3.0])
def test_ids_are_samples_of_a_policy_of_the_entropy_that_a_case_asks_for(entropy):
    inputs = make_inputs(make_case("1024x64x2048", "float32", entropy=entropy), CPU)
    log_p = (inputs.flat_hidden.detach() @ inputs.weight.detach().T).log_softmax(-1)
    found = -(log_p.exp() * log_p).sum(-1).mean().item()
    sampled = -log_p.gather(-1, inputs.ids.view(-1, 1)).mean().item()
    assert found == pytest.approx(entropy, rel=0.25) and sampled == pytest.approx(found, rel=0.15)


def test_samples_of_a_chat_model_stand_beside_the_hidden_states_that_predict_them(monkeypatch, tmp_path):
    """The log-probabilities of the ids are the model's own; a second call reads the file."""
    lm = tiny_model("llama").eval()
    lm.name_or_path = str(tmp_path / "chat")
    texts = [[7, 3, 9], [4, 5], [6, 2, 8]]
    prompts = [[5, 6], [9], [1, 2, 3]]
    calls = []
    monkeypatch.setattr(samples, "chat_model", lambda: (lm, None))
    monkeypatch.setattr(samples, "stories", lambda *given: calls.append(given) or (prompts, texts))
    hidden, weight, ids = samples.chat_samples(6, 0.7)
    assert ids.tolist() == [7, 3, 9, 4, 5, 6] and hidden.shape == (6, weight.shape[1])
    logps = (hidden @ weight.T).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    own = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            log_p = lm(torch.tensor([prompt + text])).logits[0].log_softmax(-1)
        own += [log_p[len(prompt) - 1 + t, token] for t, token in enumerate(text)]
    assert torch.allclose(logps, torch.stack(own)[:6], atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(samples.chat_samples(6, 0.7), (hidden, weight, ids), strict=True))
    assert len(calls) == 1 and [path.suffix for path in tmp_path.iterdir()] == [".pt"]


def test_the_committed_results_give_the_committed_pictures_that_say_where(tmp_path, monkeypatch):
    committed = {path.name for path in report.FIGURES.iterdir()} - OF_EARLIER_REVISION
    monkeypatch.setattr(figures, "DPI", 30)
    monkeypatch.setattr(report, "FIGURES", tmp_path / "drawn")
    report.draw()
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == committed
    document = report.load("cpu.json")
    small_print = figures.PICTURES["time"](document).get_supxlabel()
    where = document["environment"]
    machine, torch_version = f"{where['cpu']}, {where['threads']} threads, ", f"torch {where['versions']['torch']}, "
    assert small_print.startswith(machine) and torch_version in small_print
    assert small_print.endswith(f", {where['date'][:10]}")
    assert [name for name, picture in figures.PICTURES.items() if picture(document)] == ["time"]
