"""fused_forward and TRL's head against the logits of every family of causal language models that transformers has."""

from __future__ import annotations

from collections import Counter

import model_families
import pytest
import transformers
from model_families import families, families_table, heads_table, judge, judge_all, tables
from test_readme import python_blocks
from tiny_models import tiny_model

from grpo_kernels.integrations import LogitTransform
from grpo_kernels.integrations import transformers as integration
from grpo_kernels.integrations import trl as trl_integration


@pytest.fixture(autouse=True)
def nothing_was_compared_before(monkeypatch):
    monkeypatch.setattr(integration, "_checked", set())


@pytest.mark.filterwarnings("ignore")  # of the code of 270 families
def test_every_family_is_compared_or_refused_by_name():
    verdicts = judge_all()
    for family, verdict in verdicts.items():
        if verdict.what != "compared":
            print(f"{family.name}: {verdict.what}: {verdict.why}")
    assert not {family: verdict.why for family, verdict in verdicts.items() if verdict.what == "wrong"}
    assert all("model_type=" in v.why or "expected a" in v.why for v in verdicts.values() if v.what == "refused")
    counts = Counter(verdict.what for verdict in verdicts.values())
    assert counts["compared"] > 100 and counts["compared"] > 5 * counts["not built"]
    page = tables()[1]
    if page.startswith(f"Of transformers {transformers.__version__}:"):
        assert page == families_table(verdicts), "run: PYTHONPATH=. python tests/model_families.py --write"


REAL, REAL_HEAD = integration.logit_transform, integration.lm_head_inputs


def without_softcap(config):
    return LogitTransform(REAL(config).scale, None)


def without_scale(config):
    return LogitTransform(1.0, REAL(config).softcap)


def without_bias(lm_head, hidden):
    return REAL_HEAD(lm_head, hidden)._replace(bias=None)


@pytest.mark.parametrize("module", [integration, trl_integration])
@pytest.mark.parametrize("own_check", [True, False])
@pytest.mark.parametrize(("family", "fault"), [
    ("gemma3_text", without_softcap),  # None by default
    ("cohere", without_scale),
    ("granite", without_scale),  # 1 by default
])  # fmt: skip
def test_a_scale_or_softcap_that_is_forgotten_is_found(monkeypatch, family, fault, module, own_check):
    monkeypatch.setattr(module, "logit_transform", fault)
    if not own_check:
        monkeypatch.setattr(integration, "_check_once", lambda *_: None)
    assert {judge(x).what for x in families() if x.name == family} == {"wrong"}


def test_a_bias_that_is_forgotten_is_found(monkeypatch):
    monkeypatch.setattr(integration, "lm_head_inputs", without_bias)
    assert {judge(x).what for x in families() if x.name == "phi"} == {"wrong"}


def test_a_model_without_a_body_is_refused_in_trl_by_name():
    """Llama 4's model with images holds a whole language model in the place of a body."""
    family = next(x for x in families() if x.name == "llama4" and x.auto is transformers.AutoModelForImageTextToText)
    model = model_families._tiny_model(family, model_families._SHAPES[0], telling=False)
    with pytest.raises(TypeError, match="model is a Llama4ForConditionalGeneration; expected a causal language model"):
        trl_integration._add_head(model, {}, lambda: None, in_float32=False)


def test_the_page_says_what_a_chunk_of_todays_heads_holds():
    assert tables()[0] == heads_table(), "run: PYTHONPATH=. python tests/model_families.py --write"


def test_the_python_block_of_the_page_compares_a_model(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path)
    (block,) = python_blocks(model_families.PAGE.read_text(encoding="utf-8"))
    exec(block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path)), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("aligned: the log-probabilities differ by ")
