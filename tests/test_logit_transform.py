"""The rules of logit_transform against the installed transformers: the text of its models, and tiny models that run."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import TINY_MODELS, tiny_model

from grpo_kernels.integrations import LogitTransform, logit_transform
from grpo_kernels.logit_transform import _PLAIN_FAMILIES, _RULES

transformers = pytest.importorskip("transformers")
as_read = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="the rules are those of transformers 5.23",
)
# Not in transformers: the code that comes with the checkpoints.
REMOTE = {"minicpm"}
HEAD = re.compile(r"self\.lm_head\(hidden_states(\.to\((dtype=)?self\.lm_head\.weight\.dtype\))?\)")
UNSCALED = re.compile(r"hidden_states = (\w+\.last_hidden_state|\w+\[0\]|slice_logits_to_keep\(.*\))(?! [*/])")


@lru_cache
def files() -> dict[str, Path]:
    """Class name -> the file of transformers that defines it."""
    folder = Path(transformers.__file__).parent / "models"
    found = {}
    for path in folder.rglob("modeling_*.py"):
        for name in re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = path
    return found


def class_of(family: str) -> str:
    from transformers.models.auto import modeling_auto

    for mapping in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        if family in getattr(modeling_auto, mapping):
            name = getattr(modeling_auto, mapping)[family]
            return name if isinstance(name, str) else name[0]
    raise KeyError(family)


def head_code(name: str) -> list[str]:
    """The assignments of hidden_states and logits in a model's forward, and those of its attributes from the config."""
    tree = ast.parse(files()[name].read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    if "forward" not in methods:
        return head_code(next(base.id for base in node.bases if isinstance(base, ast.Name) and base.id in files()))
    found = []
    for n in ast.walk(methods["forward"]):
        if isinstance(n, (ast.Assign, ast.NamedExpr)):
            text = ast.unparse(n)
            targets = [ast.unparse(t) for t in (n.targets if isinstance(n, ast.Assign) else [n.target])]
            if re.search(r"^(lm_|router_|output_router_)?logits$|^hidden_states$|softcap|^cap$", " ".join(targets)):
                found.append(text)
    return [text for text in found if not re.match(r"(output_)?router_logits", text)]


@as_read
@pytest.mark.parametrize("family", sorted(_PLAIN_FAMILIES))
def test_a_plain_family_computes_its_logits_by_the_head_alone(family):
    code = head_code(class_of(family))
    logits = [text for text in code if "logits = " in text]
    assert len(logits) == 1 and HEAD.search(logits[0]), code
    assert re.sub(HEAD, "", logits[0]).split("= ")[1] in {"", ".float()", ".contiguous()"}, code
    assert all(UNSCALED.fullmatch(text) for text in code if text not in logits), code


@as_read
@pytest.mark.parametrize("family", sorted(set(_RULES) - REMOTE))
def test_a_rule_names_what_the_code_of_its_family_reads(family):
    rule, name = _RULES[family], class_of(family)
    code = " ; ".join(head_code(name))
    if "self.logit_softcap" in code or "self.final_logit_softcapping" in code or "self.logit_scale" in code:
        code += files()[name].read_text(encoding="utf-8")
    for attribute in (rule.times, rule.over, rule.softcap):
        assert attribute in code
    if rule.times:
        assert re.search(rf"\* [\w.]*{rule.times}\b", code)
    if rule.over:
        assert re.search(rf"/ [\w.]*{rule.over}\b", code)
    assert bool(rule.softcap) == ("tanh" in code or "soft_cap(" in code)


@as_read
@pytest.mark.parametrize("family", sorted((_PLAIN_FAMILIES | set(_RULES)) - REMOTE))
def test_the_default_configuration_of_a_family_has_a_transform(family):
    config = transformers.CONFIG_MAPPING[family]()
    if family == "cohere_compass":  # its class multiplies by a scale that is None
        config.text_config.logit_scale = 0.5
    transform = logit_transform(config)
    if family in _PLAIN_FAMILIES:
        assert transform == (1.0, None)


@pytest.mark.parametrize("family", sorted(TINY_MODELS))
def test_the_transform_of_a_tiny_model_gives_its_logits(family):
    model = tiny_model(family)
    transform = logit_transform(model.config)
    given = {}
    hook = model.get_output_embeddings().register_forward_hook(lambda module, args, output: given.update(x=args[0]))
    with torch.no_grad():
        logits = model(torch.arange(1, 9)[None]).logits
        hook.remove()
        z = model.get_output_embeddings()(given["x"])
    if family == "minicpm3":  # its hidden states are scaled before the head
        z = z / transform.scale
    z = z * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    torch.testing.assert_close(z, logits)


def test_remote_code_minicpm():
    config = SimpleNamespace(model_type="minicpm", hidden_size=2304, dim_model_base=256)
    assert logit_transform(config) == LogitTransform(256 / 2304, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such"}, "config.model_type='no_such': no rule"),
        ({}, "config is a SimpleNamespace without model_type; expected model.config"),
        ({"model_type": "llama", "logits_scaling": 8.0}, "config.logits_scaling=8.0: the logits of model_type 'llama'"),
        ({"model_type": "qwen3", "final_logit_softcapping": 30.0}, "config.final_logit_softcapping=30.0"),
        ({"model_type": "granite"}, "config.logits_scaling=None of model_type 'granite'; expected a positive number"),
        ({"model_type": "granite", "logits_scaling": 0}, "config.logits_scaling=0 of model_type 'granite'"),
        ({"model_type": "cohere", "logit_scale": True}, "config.logit_scale=True"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1.0}, "config.final_logit_softcapping=-1.0"),
        (
            {"model_type": "gemma3", "text_config": SimpleNamespace(final_logit_softcapping=30.0)},
            "config.final_logit_softcapping=30.0: the logits of model_type 'gemma3' do not depend on it",
        ),
    ],
)
def test_what_cannot_be_vouched_for_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        logit_transform(SimpleNamespace(**config))
