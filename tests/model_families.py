"""Every causal language model that transformers registers, tiny, and whether fused_forward gives its log-probabilities.

PYTHONPATH=. python tests/model_families.py [FAMILY ...]      prints a line for each, with the reason
PYTHONPATH=. python tests/model_families.py --write           writes the tables of docs/models.md
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto import modeling_auto

from grpo_kernels import fused_logps
from grpo_kernels.commands.bench.cases import HEADS
from grpo_kernels.head.chunk_size import rows_of_chunk
from grpo_kernels.integrations import transformers as integration
from grpo_kernels.integrations import trl as trl_integration

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
VOCAB, SPECIAL, LENGTH, MOST_PARAMETERS = 128, 64, 5, 12_000_000
_TABLE = re.compile(r"(?<=<!-- table -->\n\n).*?(?=\n\n<!-- end of table -->)", re.DOTALL)
# What a number counts, by the name of its attribute (the first that matches), and the most of it in a tiny model. A new
# family needs no line here where it names its sizes as others do.
_MOST = {
    re.compile(pattern): most
    for pattern, most in {
        r"vocab": VOCAB,
        r"n_groups?$|expert_group|topk_group": 1,
        r"shared_layers": 0,
        r"position_embeddings$|n_positions|n_ctx|max_.*(len|positions)": 64,
        r"heads?_.*(dim|size)|^d_(kv|head)$|dim_head|_head_?dim$|head_dim|headdim|kv_channels|d_head": 8,
        r"(mamba|ssm).*heads": 8,
        r"heads?$|n_head|num_v": 4,
        r"layers?$|n_layer|depth$|num_blocks|layers_per": 2,
        r"rank|d_state|state_size|d_rel|rotary_dim": 8,
        r"experts_per_tok|moe_k$|moe_topk|top_?k": 2,
        r"experts|expert_num": 4,
        r"hidden_size|d_model|n_embd|embed|width|dim|_size$|channels|d_inner|d_ff|dff|intermediate|ffn": 32,
    }.items()
}
_HEADS = re.compile(r"heads?$|n_head")
_WIDTH = re.compile(r"hidden_size|d_model|n_embd|embed|width|d_inner|d_ff|dff|intermediate|ffn|d_ssm|mlp_dim")
_TOKEN_ID = re.compile(r"token(?!s|.*per)|_(id|index|start|end)$")
# Names by which some family scales or caps its logits, or its attention's.
_TRANSFORM = re.compile(r"logits?_scal|soft_?cap|(output|lm_head|logits.*)_multiplier")


class Shape(NamedTuple):
    """layers: the most layers. by_heads: widths and numbers of heads are divided by the number of heads, which keeps
    the width of a head (parts of rotary positions add up to it); otherwise each number has a most."""

    layers: int
    by_heads: bool


# Tried in this order. Some families have a pattern of layers that few layers do not hold.
_SHAPES = (Shape(2, False), Shape(2, True), Shape(6, False), Shape(6, True), Shape(64, False))


class Verdict(NamedTuple):
    """what: "compared", "refused", "not built", or "wrong"."""

    what: str
    why: str


class Family(NamedTuple):
    """A model type, and the class of transformers that builds its model."""

    name: str
    auto: Any


def families() -> list[Family]:
    """Returns all causal language models that transformers registers: of text, and of images and text."""
    return [
        Family(name, auto)
        for auto, names in (
            (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
            (AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        )
        for name in names
    ]


def _tiny_config(default: PreTrainedConfig, shape: Shape, telling: bool, ids: Iterator[int]) -> PreTrainedConfig:
    """Returns a configuration of the class of `default` with small numbers; what follows from them is left to it."""
    values = vars(default)
    layers = next((values[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values), 0)
    heads = next((values[name] for name in ("num_attention_heads", "n_head", "num_heads") if name in values), 8)
    small: dict[str, Any] = {}
    for name, value in values.items():
        most = next((most for pattern, most in _MOST.items() if pattern.search(name)), None)
        if isinstance(value, PreTrainedConfig):
            small[name] = _tiny_config(value, shape, telling, ids)
        elif telling and _TRANSFORM.search(name) and type(value) in (int, float, type(None)):
            small[name] = 0.5
        elif isinstance(value, (list, tuple)) and len(value) == layers > shape.layers:  # something of each layer
            small[name] = value[: shape.layers]
        elif value is None and name in ("head_dim", "num_key_value_heads"):
            small[name] = most
        elif type(value) is not int or name.startswith("_"):
            continue
        elif _TOKEN_ID.search(name):  # no token of the text may stand for an image
            small[name] = value if value < 8 else next(ids)
        elif most == 2 and not re.search("top|moe|experts", name):
            small[name] = min(value, shape.layers)
        elif shape.by_heads and (_HEADS.search(name) or _WIDTH.search(name)) and isinstance(heads, int):
            small[name] = max(value // heads, 1)
        elif most is not None and not (shape.by_heads and most == 8):
            small[name] = min(value, most)
    return type(default)(**small)


def _tiny_model(family: Family, shape: Shape, telling: bool) -> Any:
    """Builds a model with weights large enough that its log-probabilities differ by some nats."""
    config = _tiny_config(CONFIG_MAPPING[family.name](), shape, telling, count(SPECIAL))
    auto = family.auto
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@torch.no_grad()
def compare(model: Any) -> Verdict:
    """Compares fused_forward's log-probabilities with those of the model's own logits. Raises what the model raises."""
    ids = torch.randint(8, SPECIAL, (2, 12))
    logits = model(input_ids=ids, use_cache=False).logits
    if logits.shape[:2] != ids.shape or not bool(logits.isfinite().all()):
        raise ValueError(f"logits of shape {tuple(logits.shape)} that are not all finite, or not one row per token")
    given = dict(input_ids=ids, completion_ids=ids[:, -LENGTH:])
    right = logits[:, -LENGTH - 1 : -1].log_softmax(-1).gather(-1, ids[:, -LENGTH:, None]).squeeze(-1)
    try:
        logps, _ = integration.fused_forward(model, **given, loss=fused_logps)
    except (TypeError, ValueError) as error:
        return Verdict("wrong" if "own logits differ" in str(error) else "refused", str(error))
    trl_integration._add_head(model, {}, lambda: None, in_float32=False)
    in_trl = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[:, -LENGTH:]
    error = max(float((found - right).abs().max()) for found in (logps, in_trl))
    return Verdict("compared" if error < 1e-4 else "wrong", f"log-probabilities differ by {error:.2g} nats")


def judge(family: Family) -> Verdict:
    """Compares a tiny model of the family, as it is by default; then with a scale and softcap that tell."""
    try:
        integration.logit_transform(CONFIG_MAPPING[family.name]())
    except Exception as error:  # whatever the code of 270 families raises, here and below
        if "no rule" in str(error):
            return Verdict("refused", str(error))
    why_not = ""
    for shape in _SHAPES:
        try:
            verdict = compare(_tiny_model(family, shape, telling=False))
            if verdict.what == "compared":
                telling = compare(_tiny_model(family, shape, telling=True))
                return telling if telling.what == "wrong" else verdict
            return verdict
        except Exception as error:
            why_not = why_not or f"{type(error).__name__}: {error}"
    return Verdict("not built", " ".join(why_not.split()))


def judge_all(names: Collection[str] = ()) -> dict[Family, Verdict]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return {family: judge(family) for family in families() if not names or family.name in names}
    finally:
        transformers.logging.set_verbosity(level)


def families_table(verdicts: Mapping[Family, Verdict]) -> str:
    """Returns the families by what became of them, as Markdown."""
    lines = [f"Of transformers {transformers.__version__}:", "", "| | | |", "|---|---|---|"]
    seen: dict[str, set[str]] = {}
    for family, verdict in verdicts.items():
        seen.setdefault(family.name, set()).add(verdict.what)

    def label(family: Family) -> str:
        kind = "text" if family.auto is AutoModelForCausalLM else "images"
        return family.name if len(seen[family.name]) == 1 else f"{family.name} ({kind})"

    for what in ("compared", "not built", "refused"):
        found = sorted({label(family) for family, verdict in verdicts.items() if verdict.what == what})
        lines.append(f"| {what} | {len(found)} | {', '.join(found)} |")
    return "\n".join(lines)


def heads_table() -> str:
    """Returns what a step of bfloat16 holds of 16,384 tokens' logits, by lm_head, as Markdown."""
    tokens, lines = 16_384, []
    for name, model in (("Qwen3.5", "qwen3.5"), ("Gemma-3", "gemma-3"), ("DeepSeek-V3", "deepseek-v3")):
        width, vocab = HEADS[model]
        cells = [
            name,
            f"{vocab:,} x {width:,}",
            f"{2 * vocab * width / 2**20:,.0f}",
            f"{4 * tokens * vocab / 2**20:,.0f}",
        ]
        for holds, device, itemsize in (("exponentials", "cuda", 2), ("logits", "cuda", 4), ("logits", "cpu", 2)):
            rows = rows_of_chunk(
                tokens, width, itemsize * vocab, torch.bfloat16, torch.device(device), holds=holds,
                dweight_dtype=torch.bfloat16, multiprocessors=132 if device == "cuda" else 0,
            )  # fmt: skip
            cells.append(f"{itemsize * rows * vocab / 2**20:,.0f} ({rows:,})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((
        "| `lm_head` | V x H | its weight | all logits | chunk: H100, H200 | chunk: other GPU | chunk: CPU |",
        "|---|---|---|---|---|---|---|",
        *lines,
    ))  # fmt: skip


def tables() -> list[str]:
    """Returns the tables that docs/models.md has."""
    return _TABLE.findall(PAGE.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    verdicts = judge_all([name for name in arguments if name != "--write"])
    for family, verdict in verdicts.items():
        print(f"{family.auto.__name__} {family.name}: {verdict.what}: {textwrap.shorten(verdict.why, 200)}")
    print(dict(Counter(verdict.what for verdict in verdicts.values())))
    if "--write" in arguments:
        text = PAGE.read_text(encoding="utf-8")
        new = iter((heads_table(), families_table(verdicts)))
        PAGE.write_text(_TABLE.sub(lambda _: next(new), text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
