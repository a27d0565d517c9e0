"""Decoding by CUDA graphs: the same tokens as without. Here a graph is recorded on the CPU, and CUDA tensors are fake;
`python bench/gpu.py --stages tests --tests tests/test_trainer_decoding.py` runs the tests that are marked gpu."""

from __future__ import annotations

import contextlib
import math
import re
from types import SimpleNamespace

import pytest
import torch
import training
from tiny_models import VOCAB, tiny_model
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import run

from grpo_kernels.trainer import RunError, decoding, step_kernels
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.decoding import Decoder, Decoding, StaticDecoder, choose_decoder, decoding_error
from grpo_kernels.trainer.ranks import Ranks
from grpo_kernels.trainer.sampling import _drawn, _noise, generate

PROMPTS = [[5, 6, 7]] * 3 + [[8, 9, 10, 11, 12]] + [[5, 6, 7]] + [[13]] * 2
ENDS = list(range(20, 26))
LENGTH = 12
# Windows that prompts and completions leave; other options of tiny models.
WINDOWS = {
    "cohere2": {"sliding_window": 4}, "gemma2": {"sliding_window": 4}, "gemma3_text": {"sliding_window": 4},
    "llama4_text": {"attention_chunk_size": 4}, "mistral": {"sliding_window": 4},
}  # fmt: skip
DENSE = (
    *("cohere2", "gemma2", "gemma3_text", "gpt2", "llama", "llama4_text", "minicpm3", "mistral", "opt"),
    *("qwen2", "qwen3"),
)
FAMILIES = (*DENSE, "mixtral", "qwen2_moe")  # whose products ask the driver what the GPU is


def tiny(family, **options):
    return tiny_model(family, **WINDOWS.get(family, {}), **options)


def sample(model, decoder=None, *, prompts=PROMPTS, seed=0, **options):
    torch.manual_seed(seed)
    arguments = TrainArguments(max_completion_length=LENGTH, **options)
    return generate(model, prompts, arguments, ends=ENDS, pad_id=0, decoder=decoder)


def assert_equal(found, expected, atol=1e-5):
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.ended, one.kept) == (other.ids, other.ended, other.kept)
        torch.testing.assert_close(one.logps, other.logps, atol=atol, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_gives_the_tokens_of_the_plain_loop(family):
    """Prompts of several lengths, some of them several times; rows that end at different tokens, at several ids, and
    leave; kept ids; a cache that serves several batches."""
    model = tiny(family)
    decoder = StaticDecoder(model, rows=8, new_tokens=LENGTH)
    for seed, options in enumerate([{}, {"top_k": 9, "top_p": 0.9}, {"temperature": 0.7}]):
        expected = sample(model, seed=seed, **options)
        assert len({len(s.ids) for s in expected}) > 1
        assert_equal(sample(model, decoder, seed=seed, **options), expected)
    assert decoding_error(decoder).error < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_serves_under_autocast(family):
    """Where keys, values and the weights differ in type."""
    with torch.autocast("cpu", torch.bfloat16):
        assert decoding_error(StaticDecoder(tiny(family), rows=8, new_tokens=LENGTH)).error < 0.5


def test_a_cache_grows_with_its_batches():
    model = tiny("llama", max_position_embeddings=256)
    decoder, shapes = StaticDecoder(model, rows=4, new_tokens=LENGTH), []
    for prompts in ([[5, 6, 7]] * 4, PROMPTS, [[5] * 40, [6]], PROMPTS, [[7] * 130]):
        assert_equal(sample(model, decoder, prompts=prompts), sample(model, prompts=prompts))
        shapes.append(tuple(decoder.visible.shape))
    assert shapes == [(4, 128), (7, 128), (7, 128), (7, 128), (4, 256)]


def test_rows_that_are_not_read_stay_within_the_positions_of_the_model():
    model = tiny("gpt2")
    decoder = StaticDecoder(model, rows=8, new_tokens=LENGTH)
    for prompts in ([[5] * (64 - LENGTH)] * 8, [[5, 6]] * 3):  # the second batch has four rows, and 64 positions
        assert_equal(sample(model, decoder, prompts=prompts), sample(model, prompts=prompts))


@pytest.mark.parametrize("family", DENSE)
def test_a_step_neither_reads_nor_copies_what_a_graph_could_not(family, monkeypatch):
    """Fake CUDA tensors have no values: a read of one raises. Nor does anything come from the host."""
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 0)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, dtype: self)  # which fake parameters cannot, nor need to
    monkeypatch.setattr(StaticDecoder, "_captured", lambda self, step: step)
    moved = []

    class Moves(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, found)) if isinstance(x, torch.Tensor)]
            copies = "copy" in str(function)  # others take a number of the host as an argument of the kernel
            if len({x.device.type for x in tensors if x.dim() or copies}) > 1:
                moved.append(str(function))
            return found

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            model = tiny(family)
            prompts, rows, ids = torch.ones(4, 6).long(), torch.tensor([0, 0, 1, 2, 3]), torch.ones(5).long()
        decoder = StaticDecoder(model, rows=8, new_tokens=LENGTH)
        decoder.select(decoder.start(prompts, prompts), rows)
        assert decoder.uses_graphs and decoder.is_filled
        with Moves():
            logits = decoder.next(ids)
    assert logits.device.type == "cuda" and logits.shape == (5, VOCAB) and not moved


# --- graphs, recorded -------------------------------------------------------------------------------------------------


POOL = (0, 1)


class Graph:
    """What a CUDA graph does: the operations of one step, on the same tensors each time."""

    def __init__(self):
        self.calls = []

    def replay(self):
        for function, args, options, found in self.calls:
            again = function(*args, **options)
            if not (function.is_view or function._schema.is_mutable):
                for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, found))
        return found


@pytest.fixture
def captures(monkeypatch):
    """One entry for each graph that is captured, in place of CUDA's."""
    found = []

    def graph(graph, pool, *, capture_error_mode):
        assert capture_error_mode == "thread_local" and pool == POOL
        found.append(graph)
        return Recording(graph.calls)

    for name, value in {
        "CUDAGraph": Graph, "graph": graph, "graph_pool_handle": lambda: POOL, "current_stream": lambda: "stream",
        "stream": lambda stream: contextlib.nullcontext(), "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None, "memory_reserved": lambda: 1000 * len(found),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def with_graphs(model, **options):
    decoder = StaticDecoder(model, **{"rows": len(PROMPTS), "new_tokens": LENGTH, **options})
    decoder.uses_graphs = True
    return decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_give_the_tokens_of_the_plain_loop(family, captures):
    """From weights that were changed in between, by graphs that were captured once."""
    model = tiny(family)
    decoder = with_graphs(model)
    for seed in range(3):
        assert_equal(sample(model, decoder, seed=seed), sample(model, seed=seed))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
    assert len(captures) == len(decoder.steps) <= 4
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight * 0.7)
    captures.clear()
    assert_equal(sample(model, decoder), sample(model))
    assert len(captures) == len(decoder.steps)


def test_a_step_whose_numbers_change_on_the_host_is_found_by_these_tests(captures):
    """So that the recording can fail: a model that counts its calls would be sampled wrongly by a graph."""
    model, calls = tiny("llama"), []

    def count(module, args, output):
        calls.append(1)
        return output * (1 + 0.01 * len(calls))

    model.get_input_embeddings().register_forward_hook(count)
    found = []
    for decoder in (with_graphs(model), None):
        calls.clear()
        found.append([s.logps.tolist() for s in sample(model, decoder)])
    assert found[0] != found[1]


def test_a_step_that_waits_for_the_gpu_is_not_captured(captures, monkeypatch):
    model, modes = tiny("llama"), [0]

    def wait(module, args, output):
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert decoding_error(with_graphs(model)).error < 0.01 and captures
    assert modes == [0, *["error", 0] * len(captures)]
    captures.clear()
    model.get_input_embeddings().register_forward_hook(wait)
    found = decoding_error(with_graphs(model))
    assert found == Decoding(math.inf, math.inf, "RuntimeError: called a synchronizing CUDA operation")
    assert modes[-2:] == ["error", 0] and not captures


@pytest.mark.parametrize("ended", [False, True])
def test_a_capture_that_fails_leaves_generator_and_allocator_as_they_were(ended, captures, monkeypatch):
    """ended: by torch, since it was only the step that failed."""

    class Failing(Recording):
        def __exit__(self, *args):
            super().__exit__(*args)
            raise RuntimeError("operation not permitted when stream is capturing")

    def end(device, pool):
        if ended:
            raise RuntimeError("not currently recording to mempool_id")
        calls.append(("end", device, pool))

    states, calls = [], []
    generator = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, **options: Failing([]))
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *of: calls.append(("release", *of)), raising=False)
    found = decoding_error(with_graphs(tiny("llama")))
    assert states == ["before"] and found.error == math.inf
    assert calls == ([] if ended else [("end", 0, POOL), ("release", 0, POOL)])
    assert found.reason == "RuntimeError: operation not permitted when stream is capturing"


# --- fewer kernels ----------------------------------------------------------------------------------------------------


def next_logits(model, mode=contextlib.nullcontext, **options):
    """Logits of a second step, whose operations `mode` sees."""
    decoder, prompts = StaticDecoder(model, rows=4, new_tokens=LENGTH, **options), torch.ones(4, 6).long()
    with torch.no_grad():
        decoder.select(decoder.start(prompts, prompts), torch.arange(4))
        decoder.next(prompts[:, 0])
        with mode():
            return decoder.next(prompts[:, 1])


def test_a_step_of_30_layers_is_at_most_560_kernels(monkeypatch):
    """Of SmolLM2's layers, which differ from these in size alone. Kernels are operations that are no views; those of a
    compiled part are its products and one for each tensor that it returns."""
    kernels, parts = [], []

    class Kernels(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            kernels.clear()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name
            none = function.is_view or name in ("aten::_unsafe_view", "aten::scalar_tensor")  # a number of the host
            if name == "aten::mm" or not (none or parts):
                kernels.append(name)
            return function(*args, **(kwargs or {}))

    def compiled(function):
        def call(*args, **options):
            parts.append(function)
            found = function(*args, **options)
            parts.pop()
            kernels.extend(["part"] * len(tree_leaves(found)))
            return found

        return call

    def count(layers, compiles):
        next_logits(tiny("llama", num_hidden_layers=layers), compiles=compiles, mode=Kernels)
        return len(kernels)

    monkeypatch.setattr(step_kernels, "compiled", compiled)
    for compiles, layer, model in ((False, 37, 1140), (True, 18, 560)):
        one, two = (count(layers, compiles) for layers in (1, 2))
        assert (two - one, one + 29 * (two - one)) == (layer, model)


@pytest.mark.parametrize(("family", "kinds"), [("gemma2", 4), ("gpt2", 1), ("llama", 4), ("qwen3", 6)])
def test_compiled_parts_are_few_for_all_layers_and_give_the_same_logits(family, kinds, monkeypatch):
    """Without a break. Norms of queries and of keys are kinds of their own; those of gpt2 are torch's."""
    parts, model = [], tiny(family)

    def backend(graph, inputs):
        parts.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(step_kernels, "compiled", lambda f: torch.compile(f, backend=backend, fullgraph=True))
    forwards = [type(module).forward for module in model.modules()]
    torch.testing.assert_close(next_logits(model, compiles=True), next_logits(model), atol=1e-5, rtol=0)
    assert len(parts) == kinds and forwards == [type(module).forward for module in model.modules()]


def test_weights_are_cast_once_for_a_batch_and_give_the_bits_of_a_cast_in_each_step(captures, monkeypatch):
    model, found = tiny("llama", tie_word_embeddings=True), []
    size = sum(x.numel() for x in model.parameters())
    monkeypatch.setattr(step_kernels, "compiled", lambda function: function)
    for compiles in (False, True):
        captures.clear()
        decoder, factors = with_graphs(model, compiles=compiles), (2, 0.5)
        with torch.autocast("cpu", torch.bfloat16):
            for seed, factor in enumerate(factors):
                found.append([(s.ids, s.logps.tolist()) for s in sample(model, decoder, seed=seed)])
                model.model.layers[0].mlp.up_proj.weight.data.mul_(factor)
        casts = [args[0] for graph in captures for f, args, *_ in graph.calls if f is torch.ops.aten._to_copy.default]
        assert any(isinstance(x, torch.nn.Parameter) for x in casts) != compiles
        assert sum(x.numel() for x in model.parameters()) == size  # the model has its own again
    assert found[0] != found[1] and found[:2] == found[2:]
    assert decoder.kernels.nbytes == 2 * sum(m.weight.numel() for m in model.modules() if type(m) is torch.nn.Linear)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "words"), [("_reserve", "for their cache"), ("_captured", "for them")])
def test_without_memory_sampling_goes_on(part, words, captures, monkeypatch, capsys):
    def fail(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StaticDecoder, part, fail)
    model = tiny("llama")
    decoder = with_graphs(model)
    for seed in range(2):
        assert_equal(sample(model, decoder, seed=seed), sample(model, seed=seed))
    sentence = f"sampling goes on without CUDA graphs: no memory is left {words}\n"
    assert capsys.readouterr().err == sentence and not captures


@pytest.mark.parametrize("available", [1e9, 1e5])
def test_cache_and_graphs_are_kept_where_they_are_a_small_part_of_the_memory(available, captures, monkeypatch):
    monkeypatch.setattr(decoding, "available", lambda device: available)
    model = tiny("llama")
    decoder = with_graphs(model)
    decoder.free_for_updates()
    assert decoder.memory == ""
    how, counts = "kept" if available == 1e9 else "freed", []
    for _ in range(2):
        assert_equal(sample(model, decoder), sample(model))
        held = sum(x.nbytes for x in decoder.cache_tensors) + 1000 * len(decoder.steps)
        counts.append(len(captures))
        decoder.free_for_updates()
        assert decoder.memory == f"{held / 2**20:,.1f} MiB of cache and CUDA graphs, {how} before updates"
        assert bool(decoder.cache_tensors) == bool(decoder.steps) == (how == "kept") and decoder.cache is None
    assert counts[1] == counts[0] * (1 if how == "kept" else 2)


# --- the check and the choice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_the_check_sees_a_static_cache_that_loses_tokens(family, monkeypatch):
    update = decoding._CacheLayer.update

    def forgetful(self, keys, values):
        self.keys[:, :, : int(self.get_seq_length())] = 0
        return update(self, keys, values)

    monkeypatch.setattr(decoding._CacheLayer, "update", forgetful)
    assert decoding_error(StaticDecoder(tiny(family), rows=8, new_tokens=LENGTH)).error > 1.5


class Told(torch.nn.Module):
    """A policy on a GPU of which the check finds what it is told."""

    def __init__(self, **found):
        super().__init__()
        self.lm, self.found = SimpleNamespace(device=torch.device("cuda")), found

    def forward(self, task):
        decoder = self.decoder
        if getattr(decoder, "compiles", False) and "compiled" in self.found:
            return self.found["compiled"]
        return self.found["graphs" if isinstance(decoder, StaticDecoder) else "cache" if decoder.cached else "none"]


GOOD, BAD = Decoding(0.1, 0.0), Decoding(3.0, 0.25)


@pytest.mark.parametrize(("found", "chosen", "words"), [
    ({"graphs": GOOD}, StaticDecoder, ""),
    ({"compiled": Decoding(math.inf, math.inf, "TritonMissing: none"), "graphs": GOOD}, StaticDecoder,
     "SimpleNamespace is sampled without compiled parts (TritonMissing: none)\n"),
    ({"graphs": Decoding(math.inf, math.inf, "RuntimeError: it waits"), "cache": GOOD}, Decoder,
     "SimpleNamespace is sampled without CUDA graphs (RuntimeError: it waits)\n"),
    ({"graphs": BAD, "cache": BAD, "none": GOOD}, Decoder,
     "SimpleNamespace is sampled without a cache (which would lose 0.25 nats of a token)\n"),
])  # fmt: skip
def test_the_first_decoder_that_is_right_is_chosen_with_one_sentence(found, chosen, words, capsys):
    policy = Told(**found)
    choose_decoder(policy, Ranks(use_cpu=True), TrainArguments(per_device_train_batch_size=8, num_generations=4))
    assert type(policy.decoder) is chosen and policy.decoder.cached == ("none" not in found)
    assert capsys.readouterr().err == words
    if chosen is StaticDecoder:
        assert (policy.decoder.rows, policy.decoder.new_tokens, policy.decoder.compiles) == (8, 256, not words)


def test_a_run_captures_once_and_samples_what_it_does_without_graphs(
    captures, model, data, tmp_path, monkeypatch, capfd
):
    """Over updates in place, exchanges with the reference, evaluations; a dry run says what is held."""
    options = {"reward_funcs": "training:length", "beta": 0.1, "eval_dataset_name": data, "use_peft": True}
    assert run(model, data, tmp_path / "plain", **options) == 0 and not captures
    monkeypatch.setattr(decoding, "Decoder", lambda lm, cached=True: with_graphs(lm, rows=8, new_tokens=5))
    monkeypatch.setattr(decoding, "available", lambda device: 1e9)
    assert run(model, data, tmp_path / "graphs", **options) == 0
    for one, other in zip(*(training.rollouts(tmp_path / name) for name in ("plain", "graphs")), strict=True):
        assert [c.ids for c in one] == [c.ids for c in other]
    assert all(record["rollout_mismatch/max"] < 1e-5 for record in training.steps(tmp_path / "graphs"))
    in_check = 2  # whose cache is not kept
    assert in_check < len(captures) <= in_check + 4
    assert run(model, data, tmp_path / "dry", dry_run=True, **options) == 0
    assert re.search(r"\nsampling   [\d.]+ MiB of cache and CUDA graphs, kept before updates\n", capfd.readouterr().out)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_graphs_give_the_tokens_of_the_plain_loop_on_a_gpu(family, compiles, exact):
    model = tiny(family).cuda()
    decoder = StaticDecoder(model, rows=len(PROMPTS), new_tokens=LENGTH, compiles=compiles)
    for seed in range(3):
        assert_equal(sample(model, decoder, seed=seed), sample(model, seed=seed), atol=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
    assert 0 < len(decoder.steps) <= 4 and decoder.graph_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("mixtral", torch.bfloat16)])
def test_replays_under_autocast_follow_the_weights(family, dtype, compiles, exact):
    """In bfloat16 tokens differ by rounding: the check's measure is for that. Experts in float32 wait for the GPU."""
    model = tiny(family, dtype=dtype).cuda()
    decoder = StaticDecoder(model, rows=len(PROMPTS), new_tokens=LENGTH, compiles=compiles)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            assert decoding_error(decoder).error <= 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
    assert len(decoder.steps) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize()])
def test_a_model_that_waits_for_the_gpu_is_sampled_without_graphs(wait):
    """Also where the capture itself breaks, after which others succeed."""
    model = tiny("llama").cuda()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: wait(output) and None)
    found = decoding_error(StaticDecoder(model, rows=8, new_tokens=LENGTH))
    assert found.error == math.inf and found.reason.partition(":")[0] in ("RuntimeError", "AcceleratorError")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert decoding_error(Decoder(model)).error < 0.1
    assert all(s.ids for s in sample(model))
    assert decoding_error(StaticDecoder(tiny("llama").cuda(), rows=8, new_tokens=LENGTH)).error < 0.1


@pytest.mark.gpu
def test_nan_ends_no_work_on_a_gpu():
    rows = torch.full((2, 5), math.nan, device="cuda")
    assert (_drawn(rows, _noise(rows)) < 5).all()
    model = tiny("llama").cuda()
    model.get_output_embeddings().weight.data.fill_(math.nan)
    with pytest.raises(RunError, match="the policy's logits are NaN"):
        sample(model, StaticDecoder(model, rows=len(PROMPTS), new_tokens=LENGTH))
    torch.cuda.synchronize()
