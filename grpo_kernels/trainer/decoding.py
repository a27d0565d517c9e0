"""The model's side of sampling: logits of the next tokens, token by token, and whether they can be had so.

On a GPU a step of the plain loop is launches from Python, ten times the arithmetic of a small model; there it is a CUDA
graph over a cache of fixed length. transformers' own loops (5.23) do not serve: `generate` keeps all rows until the
last has ended, static layers with a sliding window count on the host, which a graph does not repeat, and continuous
batching does not return the ids that truncated sampling kept, and runs in a thread that no interrupt and no hook of
FSDP2 reaches.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import Cache, StaticLayer

from ..integrations.transformers import PLAIN_LAYERS, cache_argument, cache_of, position_ids, takes, unwrap_causal_lm
from . import reason_of
from .arguments import TrainArguments
from .memory import available
from .ranks import Ranks
from .rollout import infer, padded
from .step_kernels import StepKernels

MIB = 2**20
CELLS = 128  # lengths of a static cache are multiples of it: graphs serve one length, prompts have many
PARTS = (8, 4, 2, 1)  # a graph for an eighth of its rows, for a quarter, ...: a batch takes the first that holds it
SHARE_KEPT = 0.1  # of a GPU's memory that nothing else has: what cache and graphs may keep during updates


class Decoder:
    """Calls a model token by token, for a batch whose rows can be selected: transformers' `generate` keeps them all.

    After start comes select, then next, and select again where rows are to leave.
    Positions are those that the loss scores with. A model that is used without a cache, or keeps none, gets the whole
    sequences each time.
    """

    memory = ""  # what is held between rollouts, in words
    ids: Any  # of the batch: tokens (B, L), their mask, the model's cache
    mask: Any
    cache: Any

    def __init__(self, lm: Any, *, cached: bool = True) -> None:
        self.lm, self.cached = lm, cached
        self.free()

    def free(self) -> None:
        """Frees all memory."""
        self.ids = self.mask = self.cache = None

    def free_for_updates(self) -> None:
        """Frees what the updates after a rollout may need."""
        self.free()

    def start(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, V) float32 of the first tokens after prompts (B, P), padded on the left."""
        self.parts = unwrap_causal_lm(self.lm)
        self.options: dict[str, Any] = {"logits_to_keep": 1} if takes(self.parts.model, "logits_to_keep") else {}
        self.ids, self.mask, self.cache = ids, mask, None
        return self._call()

    def next(self, ids: Tensor) -> Tensor:
        """Logits of the tokens after `ids` (B,)."""
        self.ids = torch.cat([self.ids, ids[:, None]], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        return self._call()

    def select(self, values: Tensor, rows: Tensor) -> Tensor:
        """Returns values[rows]; these rows, some of them several times, are the batch from now on."""
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        if self.cache is not None:
            self.cache.reorder_cache(rows)
        return values[rows]

    def _call(self) -> Tensor:
        ids, mask, options = self.ids, self.mask, dict(self.options)
        if self.cache is not None:
            ids = ids[:, -1:]
            options[cache_argument(self.parts.model)] = self.cache
            if not any(hasattr(layer, "keys") for layer in self.cache.layers):
                mask = mask[:, -1:]  # a model with states alone, such as Mamba, takes a mask of the tokens that it gets
        positions = position_ids(self.parts, self.mask)
        if positions is not None:
            options["position_ids"] = positions[:, -ids.shape[1] :]
        output = self.lm(input_ids=ids, attention_mask=mask, use_cache=self.cached, **options)
        self.cache = cache_of(output) if self.cached else None
        return output.logits[:, -1].float()


# --- by CUDA graphs ---------------------------------------------------------------------------------------------------


class StaticDecoder(Decoder):
    """Decodes from a cache of fixed length: all steps have the same shapes and addresses, and on a GPU are replays of a
    CUDA graph.

    Prompts run as in `Decoder`. Their keys and values are copied to a cell per token, so that the next token has the
    same cell in all rows; later cells, and those left of a sliding window, are hidden by the model's own masks. A batch
    has the first rows of the cache; the others of its graph are computed and not read. Cache and graphs serve all
    batches that they have room for, as long as no weight is moved.
    """

    def __init__(self, lm: Any, *, rows: int, new_tokens: int, compiles: bool = False) -> None:
        """rows, new_tokens: of the largest batch that is expected. compiles: the steps are those of StepKernels."""
        self.rows, self.new_tokens, self.compiles, self.has_memory = rows, new_tokens, compiles, True
        self.uses_graphs = lm.device.type == "cuda"
        super().__init__(lm)

    def free(self) -> None:
        super().free()
        self._drop()

    def _drop(self) -> None:
        self.is_filled = False
        self.cache_tensors: list[Tensor] = []  # keys and values of each layer in turn, (rows, heads, cells, D)
        self.tokens = self.positions = self.visible = self.at = torch.empty(0, 0)
        self.steps: dict[int, Callable[[], Tensor]] = {}  # by the number of rows
        self.addresses: list[int] = []  # of the weights
        self.pool: Any = None  # memory of the graphs, which are never replayed at once
        self.graph_bytes = 0
        self.kernels: StepKernels | None = None

    def free_for_updates(self) -> None:
        """Keeps cache and graphs where they are a small part of the memory; they are made again otherwise."""
        super().free()
        held = sum(tensor.nbytes for tensor in self.cache_tensors) + self.graph_bytes
        held += self.kernels.nbytes if self.kernels else 0
        if held:
            is_small = held <= SHARE_KEPT * (held + available(self.lm.device))
            how = "kept" if is_small else "freed"
            self.memory = f"{held / MIB:,.1f} MiB of cache and CUDA graphs, {how} before updates"
            if not is_small:
                self._drop()

    def start(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.is_filled = False
        return super().start(ids, mask)

    def select(self, values: Tensor, rows: Tensor) -> Tensor:
        if self.is_filled:
            for tensor in (*self.cache_tensors, self.positions, self.visible):
                tensor[: len(rows)] = tensor[rows]
        elif self.has_memory:
            self._fill(rows)
        return values[rows] if self.is_filled else super().select(values, rows)

    def next(self, ids: Tensor) -> Tensor:
        if not self.is_filled:
            return super().next(ids)
        count = len(ids)
        size = next(size for part in PARTS if (size := -(-len(self.tokens) // part)) >= count)
        self.tokens[:count, 0] = ids
        self.positions += 1
        self.at += 1
        if size not in self.steps:
            self.steps[size] = self._step(size)
        return self.steps[size]()[:count]

    def _fill(self, rows: Tensor) -> None:
        """Gives each row what its prompt, rows[k], has left, if there is memory for it."""
        positions, count, width = position_ids(self.parts, self.mask), len(rows), self.mask.shape[1]
        if positions is None:
            raise TypeError("it counts positions in its own way")
        for layer in self.cache.layers:
            if type(layer) not in PLAIN_LAYERS:
                raise TypeError(f"its cache has a {type(layer).__name__}")
        keys_and_values = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        cells, addresses = width + self.new_tokens, [t.data_ptr() for t in (*self.lm.parameters(), *self.lm.buffers())]
        if count > len(self.visible) or cells > self.visible.shape[1] or addresses != self.addresses:
            self._drop()
            try:
                self._reserve(max(count, self.rows), -(-cells // CELLS) * CELLS, keys_and_values)
            except torch.OutOfMemoryError:
                print("sampling goes on without CUDA graphs: no memory is left for their cache", file=sys.stderr)
                self._drop()
                self.has_memory = False
                return
            self.addresses = addresses
        if self.kernels:
            self.kernels.refresh()
        self.at.fill_(width - 1)
        self.positions.zero_()  # rows that are not read stay behind the batch, within the model's positions
        self.positions[:count] = positions[rows, -1:]
        self.visible.fill_(1)
        self.visible[:count, :width] = self.mask[rows]
        for tensor, prompt in zip(self.cache_tensors, keys_and_values, strict=True):
            tensor[:count, :, width - prompt.shape[2] : width] = prompt[rows]  # of a sliding window the last tokens
        self.is_filled, self.cache = True, None

    def _reserve(self, rows: int, cells: int, like: list[Tensor]) -> None:
        self.cache_tensors = [tensor.new_zeros(rows, tensor.shape[1], cells, tensor.shape[3]) for tensor in like]
        self.tokens, self.positions = self.mask.new_zeros(rows, 1), self.mask.new_zeros(rows, 1)
        self.visible, self.at = self.mask.new_ones(rows, cells), self.mask.new_zeros(1)
        self.kernels = StepKernels(self.lm, self.lm.device.type) if self.compiles else None

    def _step(self, size: int) -> Callable[[], Tensor]:
        """Calls the model for the first `size` rows, and returns logits (size, V)."""
        pairs = zip(self.cache_tensors[::2], self.cache_tensors[1::2], strict=True)
        layers: list[Any] = [_CacheLayer(keys[:size], values[:size], self.at) for keys, values in pairs]
        inputs: dict[str, Any] = {
            "input_ids": self.tokens[:size], "attention_mask": self.visible[:size], "use_cache": True,
            "position_ids": self.positions[:size], cache_argument(self.parts.model): Cache(layers=layers),
        }  # fmt: skip

        kernels = self.kernels

        def step() -> Tensor:
            with kernels.used() if kernels else nullcontext():
                logits: Tensor = self.lm(**inputs, **self.options).logits[:, -1].float()
            return logits

        if not self.uses_graphs:
            return step
        try:
            return self._captured(step)
        except torch.OutOfMemoryError:
            self.uses_graphs = False
            print("sampling goes on without CUDA graphs: no memory is left for them", file=sys.stderr)
            return step

    def _captured(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Replays of a step, which may run more than once: it writes the same cells. Raises RuntimeError for one that
        waits for the GPU, which a graph cannot."""
        graph, pool = torch.cuda.CUDAGraph(), self.pool or torch.cuda.graph_pool_handle()
        on, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", dtype, on, cache_enabled=False):  # else replays would read this step's cast weights
            step()  # libraries set themselves up, kernels are compiled
            with _waits_are_errors():  # before a capture would break
                step()
            try:
                # Other threads, such as NCCL's, go on with calls that a capture forbids. Until torch 2.14 one that
                # breaks leaves its stream the current one.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
                ):
                    before = torch.cuda.memory_reserved()
                    logits = step()
                    self.graph_bytes += torch.cuda.memory_reserved() - before
            except RuntimeError:
                _end_capture(pool)
                raise
        self.pool = pool

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Lets a call within it that waits for the GPU raise RuntimeError, but for torch.cuda.synchronize()."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _end_capture(pool: Any) -> None:
    """Undoes what torch leaves of a capture that broke: a generator that draws for none but graphs, and an allocator
    that neither empties its cache nor retries."""
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # the capture was ended: it was only the step that failed
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


class _CacheLayer(StaticLayer):
    """Keys and values (rows, heads, cells, D) of a layer, written in place. at, (1,): the cell of the next token."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.cumulative_length, self.is_initialized = keys, values, at, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        # Under autocast values may have fewer bits than keys, and those of a prompt have as many.
        self.keys.index_copy_(2, self.cumulative_length, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.cumulative_length, value_states.to(self.values.dtype))
        return self.keys, self.values


# --- whether a model can be sampled so --------------------------------------------------------------------------------

PROMPT_LENGTHS, STEPS = (1, 6, 3), 2  # of the check: few positions, since a model may have few
MARGIN = 8  # of 70 sound models none is off by 2.5 times what one rounding of its embeddings does; a lost state is by 9


class Decoding(NamedTuple):
    """How far the decoder is from the model. error: of log-probabilities, as a multiple of what rounding may do; above
    1 the decoder is wrong. nats: the largest mean error of a token. reason: why there is none, with infinite ones."""

    error: float
    nats: float
    reason: str = ""


def choose_decoder(policy: nn.Module, ranks: Ranks, arguments: TrainArguments) -> None:
    """Sets the policy's decoder: the first that its model can be sampled with, on a GPU by CUDA graphs, else with the
    model's cache, else without one; every rank asks. What is not used is said, with the reason. Raises ValueError for a
    model that cannot be sampled in a padded batch at all."""
    policy.eval()
    wrapped: Any = getattr(policy, "module", policy)  # within DDP
    lm, reason = wrapped.lm, ""
    name = type(lm.get_base_model() if hasattr(lm, "get_base_model") else lm).__name__
    decoders = [("CUDA graphs", Decoder(lm)), ("a cache", Decoder(lm, cached=False))]
    if lm.device.type == "cuda" and isinstance(policy, FSDPModule):
        reason = "FSDP2 moves its weights"
    elif lm.device.type == "cuda":
        rows, new_tokens = arguments.rows_per_rollout(1), arguments.max_completion_length
        decoders[:0] = [
            (missing, StaticDecoder(lm, rows=rows, new_tokens=new_tokens, compiles=compiles))
            for missing, compiles in (("", True), ("compiled parts", False))
        ]
    for missing, decoder in decoders:
        wrapped.decoder = decoder
        decoding = max(ranks.gather([infer(policy, "decoding_error")]))
        if math.isnan(decoding.error):
            raise ValueError(f"{name}: the log-probabilities of its tokens are NaN; expected weights that are finite")
        if decoding.error <= 1:
            if reason and ranks.index == 0:
                print(f"{name} is sampled without {missing} ({reason})", file=sys.stderr)
            decoder.free()
            return
        reason = decoding.reason or f"which would lose {decoding.nats:.2g} nats of a token"
    raise ValueError(
        f"{name}: in a batch that is padded on the left, its log-probabilities differ by {decoding.nats:.2g} nats "
        "from those of each row alone; expected a causal model whose attention_mask hides padding"
    )


@torch.no_grad()
def decoding_error(decode: Decoder) -> Decoding:
    """Compares decoding, of a padded batch whose rows are selected, with a forward of whole rows without padding before
    them. Infinite where the model keeps no cache, or one that cannot be used so.

    An error counts by the probabilities of the model, relative to the spread of a token's log-probabilities. What
    rounding may do is measured: a router that sends tokens to other experts makes much of it, in 16 bits. The error has
    to be found in half of the rows.
    """
    lm, random = decode.lm, torch.Generator().manual_seed(0)
    device = lm.device
    size = lm.get_input_embeddings().weight.shape[0]
    prompts = [torch.randint(size, (length,), generator=random).tolist() for length in PROMPT_LENGTHS]
    twice = torch.arange(len(prompts)).repeat_interleave(2)
    more = torch.randint(size, (len(twice), STEPS), generator=random)
    whole = [prompts[i] + tokens for i, tokens in zip(twice.tolist(), more.tolist(), strict=True)]
    expected, first = _own_logps(lm, whole), torch.tensor(PROMPT_LENGTHS)[twice] - 1
    with perturbed([lm.get_input_embeddings()], lm, random):
        rounded = _own_logps(lm, whole)
    rows, errors = torch.arange(len(twice)), []
    try:
        logits = decode.start(*padded(prompts, 0, device, left=True))
        if decode.cached and decode.cache is None:
            return Decoding(math.inf, math.inf, "it keeps none")
        logits = decode.select(logits, twice.to(device))
        for step in range(STEPS + 1):
            at = rows.to(device), (first[rows] + step).to(device)
            differences = _errors(_logps(logits), expected[at])
            errors.append(torch.stack([*differences, _errors(rounded[at], expected[at])[0]]))
            if step == 1:  # a part of the rows, in another order
                kept = torch.tensor([4, 1, 2])
                rows = rows[kept]
                decode.select(logits, kept.to(device))
            if step < STEPS:
                logits = decode.next(more[rows, step].to(device))
    except torch.OutOfMemoryError:  # which says nothing about the cache
        raise
    except Exception as failure:  # of many types: no cache among the arguments, rows that cannot be selected, no graph
        if not decode.cached:
            raise
        return Decoding(math.inf, math.inf, reason_of(failure)[:200])
    error, nats, rounding = torch.stack(errors).amax(0).tolist()
    return Decoding(error / (MARGIN * rounding or 1.0), nats)


def _errors(logps: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the median over rows of the mean error of log-probabilities (B, V): relative to their spread, and in
    nats."""
    nats = (expected.exp() * (logps - expected).abs()).sum(-1)
    return (nats / expected.std(-1)).median(), nats.median()


def _own_logps(lm: Any, rows: Sequence[list[int]]) -> Tensor:
    """Returns log-probabilities (B, longest, V) of rows that are padded on the right, which changes no token before
    it."""
    ids, mask = padded(rows, 0, lm.device, left=False)
    positions = position_ids(unwrap_causal_lm(lm), mask)
    options = {} if positions is None else {"position_ids": positions}
    return _logps(lm(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits)


def _logps(logits: Tensor) -> Tensor:
    """Returns log-probabilities in float32, bounded, so that ids which a model rules out do not count."""
    return logits.float().log_softmax(-1).clamp(min=-30)


@contextmanager
def perturbed(modules: Sequence[nn.Module], lm: Any, random: torch.Generator) -> Iterator[None]:
    """Changes the outputs of modules of `lm`, within it, by a unit of rounding, up or down; in float32 by one of
    TF32."""
    kind = lm.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else lm.dtype
    unit = max(torch.finfo(dtype).eps, 2**-10)

    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        sign = 2 * torch.randint(2, output.shape, generator=random) - 1
        return output * (1 + unit * sign.to(output.device)).to(output.dtype)

    hooks = [module.register_forward_hook(change) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
