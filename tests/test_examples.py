"""Each script of examples/ runs, or where its trainer is not installed, does what it says with a recorded contract."""

from __future__ import annotations

import enum
import importlib.util
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import verl_package
from accelerate.state import AcceleratorState
from emulator.build import build_program
from model_calls import LENGTH, batch, own_logps, positions_of
from tiny_models import tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM

from grpo_kernels import GRPOConfig
from grpo_kernels.integrations.lm_head import HeadInputs
from grpo_kernels.integrations.transformers import head_logits
from grpo_kernels.reference import reference_loss_from_logps
from grpo_kernels.trainer.rewards import Rewards

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["plain_transformers", "liger", "dpo", "losses", "diffusion", "vllm_teacher", "served_teacher"]
)
def test_it_runs(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "loss " in capsys.readouterr().out


@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_served_hidden_states_make_the_logits_of_the_teacher(family, tmp_path, monkeypatch):
    """With a scale and a softcap, by what vLLM's connector writes and its server answers, read in November 2026 from
    their sources."""
    example, model = load("served_teacher"), tiny_model(family).bfloat16()
    model.save_pretrained(tmp_path / "model")
    (served := tmp_path / "served").mkdir()

    def answer(request: Any) -> io.BytesIO:
        path = example.write_states(model, json.loads(request.data)["prompt"], served)
        return io.BytesIO(json.dumps({"kv_transfer_params": {"hidden_states_path": str(path)}}).encode())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    prompt, completions = [5, 9, 2], [[7, 1, 30, 4], [8, 11]]
    states = [example.ask("http://localhost", served, "model", prompt + ids) for ids in completions]
    assert not list(served.iterdir()) and all(x.dtype == torch.bfloat16 for x in states)
    teacher = example.make_teacher(example.load_head(tmp_path / "model"), states, completions)
    head = HeadInputs(teacher.hidden, teacher.weight, None)
    logits = head_logits(head, teacher.logit_scale, teacher.logit_softcap)
    for row, ids in enumerate(completions):
        expected = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits[row, : len(ids)], expected, rtol=2e-2, atol=2e-3)
    with pytest.raises(ValueError, match="has the states of other ids than the request's"):
        example.read_states(served, example.write_states(model, [5, 9], served), [5, 8])
    (link := served / "link").symlink_to(elsewhere := example.write_states(model, [5, 9], tmp_path))
    for path in (elsewhere, served / ".." / elsewhere.name, link):
        with pytest.raises(ValueError, match=r"the server names the file .*; expected one in"):
            example.read_states(served, path, [5, 9])
    assert elsewhere.exists()


def test_trl_with_several_teachers():
    """One alone is the teacher of TRL's trainer; so are two of the same weights, in batches that have both."""
    pytest.importorskip("trl", reason="trl is not installed: run make test")
    from trl import DistillationConfig

    parity = importlib.import_module("trl_parity")
    trainer_of, options = load("trl_teachers").SeveralTeachersTrainer, {"beta": 0.3, "temperature": 0.7}

    def result(names: list[str], **families: str) -> dict[str, Any]:
        teachers = {name: tiny_model(family) for name, family in families.items()}
        data = parity.prompts().add_column("teacher_id", names * 4)
        args = DistillationConfig(output_dir="unused", max_completion_length=8, **parity.COMMON | options)
        return parity.result_of(
            parity.construct(trainer_of, "granite", teachers=teachers, args=args, train_dataset=data)
        )

    expected = parity.run("trl", parity.Case("", options, "granite", teacher="qwen2"))
    for found in (result(["b", "b"], a="gemma2", b="qwen2"), result(["a", "b"], a="qwen2", b="qwen2")):
        assert max(parity.differences(found, expected)) < parity.TOLERANCE
    with pytest.raises(ValueError, match=r"teacher_id holds \['c'\]; expected \['a', 'b'\]"):
        result(["a", "c"], a="qwen2", b="qwen2")


def test_notebooks_hold_no_outputs():
    """`make notebook` runs them."""
    (notebook,) = EXAMPLES.glob("*.ipynb")
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


def test_cpp_on_the_emulated_gpu():
    done = subprocess.run([build_program(EXAMPLES / "cpp" / "main.cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("logp ") == 6 and "largest error: " in done.stdout


def test_an_extension_of_ones_own(tmp_path, monkeypatch):
    subprocess.run([sys.executable, EXAMPLES / "cpp" / "build.py", "--extension", tmp_path], check=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    logps = importlib.import_module("extension").logps
    logits, ids = 4 * torch.randn(6, 1003), torch.randint(1003, (6,))
    expected = (logits / 0.7).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(logps(logits.numpy(), ids.numpy(), temperature=0.7)), expected)
    for wrong in (logits[0], logits[:, :5]):
        with pytest.raises(ValueError, match="expected"):
            logps(wrong.numpy(), [5] * 6)


def test_verl(monkeypatch):
    """With verl 0.9.1 itself, without its dependencies."""
    verl_package.install(monkeypatch)
    load("verl_losses")
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    given = dict(advantages=torch.randn(2, 3), response_mask=torch.ones(2, 3), config=verl_package.ActorConfig())
    for name in ("grpo_kernels", "gspo_fused"):
        loss, metrics = core.get_policy_loss_fn(name)(torch.zeros(2, 3) - 2, torch.zeros(2, 3) - 2, **given)
        assert loss.isfinite() and "actor/ppo_kl" in metrics


@pytest.mark.parametrize("tied", [False, True])
def test_prime_rl(tied):
    """The contract is recorded in tests/test_prime_rl.py."""
    model, inputs = tiny_model("granite", tie_word_embeddings=tied), batch()
    expected = own_logps(model, inputs)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    hidden = model.model(**given, position_ids=positions_of(inputs)).last_hidden_state[:, -LENGTH - 1 : -1]
    load("prime_rl_model").replace_output_layer(model)
    out = model.lm_head(hidden, inputs["completion_ids"], torch.ones(4, LENGTH))
    torch.testing.assert_close(out["logprobs"], expected, rtol=1e-4, atol=1e-5)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


# Recorded in November 2026 from the sources of NeMo-RL: the members of two enumerations, the call of a loss function
# with log-probabilities, the keys of `data`, each (B, S) but sample_mask (B,).
LOSS_TYPES = {"LossType": ("TOKEN_LEVEL", "SEQUENCE_LEVEL"), "LossInputType": ("LOGIT", "LOGPROB", "DISTILLATION")}


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_nemo_rl_by_a_recorded_contract(monkeypatch, aggregation):
    interfaces = ModuleType("nemo_rl.algorithms.loss.interfaces")
    for name, members in LOSS_TYPES.items():
        setattr(interfaces, name, enum.Enum(name, members))
    monkeypatch.setitem(sys.modules, interfaces.__name__, interfaces)
    config = GRPOConfig(aggregation=aggregation, beta=0.1, epsilon_high=0.28)
    loss_fn = load("nemo_rl_loss").FusedPolicyLossFn(config)
    assert loss_fn.input_type is interfaces.LossInputType.LOGPROB
    level = "TOKEN_LEVEL" if aggregation == "token_mean" else "SEQUENCE_LEVEL"
    assert loss_fn.loss_type is interfaces.LossType[level]

    logps = (-2 + 0.4 * torch.randn(4, 8)).double()
    keys = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data = {key: torch.nn.functional.pad(logps + 0.3 * torch.randn(4, 8), (1, 0)) for key in keys}
    data |= {"advantages": torch.randn(4, 9).double(), "token_mask": (torch.rand(4, 9) > 0.3).long()}
    data["sample_mask"] = torch.tensor([1, 1, 0, 1])
    tokens, sequences = torch.tensor(40.0), torch.tensor(6.0)
    expected = reference_loss_from_logps(
        logps, data["advantages"][:, 1:], completion_mask=data["token_mask"][:, 1:] * data["sample_mask"][:, None],
        old_logps=data[keys[0]][:, 1:], ref_logps=data[keys[2]][:, 1:], config=config,
        normalizer=tokens if aggregation == "token_mean" else sequences,
    ).loss  # fmt: skip
    # Two micro-batches add up to the batch.
    found = [
        loss_fn(logps[rows], {key: x[rows] for key, x in data.items()}, sequences, tokens)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(found[0][0] + found[1][0], expected, rtol=1e-6, atol=1e-8)
    assert sum(metrics["num_valid_samples"] for _, metrics in found) == 3
    assert all(isinstance(value, (int, float)) for _, metrics in found for value in metrics.values())


class Actor(torch.nn.Module):
    """What OpenRLHF 0.11.2's Actor has that the patch reads, recorded in November 2026; its forward returns a mark."""

    def __init__(self, model):
        super().__init__()
        self.model, self.temperature, self.packing_samples = model, 0.8, False

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, **others):
        return "original", others


def test_openrlhf_by_a_recorded_contract():
    load("openrlhf_actor").patch(Actor)
    model, inputs = tiny_model("qwen2"), batch()
    actor, sequences, attention_mask = Actor(model), inputs["input_ids"], inputs["attention_mask"]
    action_mask = attention_mask[:, -LENGTH:]
    logits = model(sequences, attention_mask=attention_mask, position_ids=positions_of(inputs)).logits / 0.8
    log_p = logits[:, -LENGTH - 1 : -1].log_softmax(-1)
    expected = log_p.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1) * action_mask
    logps = actor(sequences, action_mask, attention_mask)
    torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-5)
    actor.model = torch.nn.DataParallel(model)  # has the model inside, like DeepSpeed's engine
    logps, output = actor(sequences, action_mask, attention_mask, return_output=True, return_entropy=True)
    torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-5)
    assert output.entropy.shape == (4, sequences.shape[1] - 1)
    entropy = -(log_p.exp() * log_p).sum(-1) * action_mask
    torch.testing.assert_close(output.entropy[:, -LENGTH:], entropy, rtol=1e-4, atol=1e-5)
    # What the patch does not serve is OpenRLHF's own.
    assert actor(sequences, None, attention_mask)[0] == "original"
    assert actor(sequences, action_mask, attention_mask, packed_seq_lens=[3], return_entropy=True) == (
        "original", {"packed_seq_lens": [3], "return_entropy": True},
    )  # fmt: skip
    actor.packing_samples = True
    assert actor(sequences, action_mask, attention_mask)[0] == "original"


# --- examples/losses.py, diffusion.py and dpo.py: the formulas over whole logits, in float64 --------------------------

DPO_ROWS = 4  # two pairs
FUNCTIONS = {name: f for name, f in vars(load("losses")).items() if name.endswith("_loss") and name[:5] != "fused"}
FUNCTIONS |= {"dpo_loss": load("dpo").dpo_loss, "espo_loss": load("diffusion").espo_loss}
G = torch.Generator().manual_seed(3)
B, T, H, V = 5, 7, 12, 30
HIDDEN, WEIGHT = (torch.randn(*size, generator=G, dtype=torch.float64) for size in ((B, T, H), (V, H)))
WEIGHT *= 0.4
IDS = torch.randint(V, (B, T), generator=G)
MASK = (torch.arange(T) < torch.tensor([7, 2, 5, 1, 6])[:, None]).double()
MASK[0, 2] = 0.0  # a hole, as a tool's answer leaves
LOGPS = (HIDDEN @ WEIGHT.T).log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1)
OLD, REF = (LOGPS + 0.5 * torch.randn(B, T, generator=G, dtype=torch.float64) for _ in range(2))
OLD[4] -= 1.6  # ratios beyond FIPO's bound of 4
A = torch.randn(B, generator=G, dtype=torch.float64)
A[4] = -abs(A[4])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)


def mean(x: Tensor, m: Tensor = MASK) -> Tensor:
    return (x * m).sum() / m.sum()


def ppo(r: Tensor, a: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def topr(logp: Tensor) -> Tensor:
    weight = torch.where(REWARDS[:, None] > 0, 1.0, (logp - OLD).exp().detach().clamp(0, 1))
    return mean(-weight * A[:, None] * logp)


def fipo(logp: Tensor) -> Tensor:
    x, gamma = ((logp - OLD) * MASK).detach(), 2 ** (-1 / 32)
    future = torch.zeros_like(x)
    for t in range(T):
        future[:, t] = sum(gamma ** (k - t) * x[:, k] for k in range(t, T))
    r = (logp - OLD).exp()
    weight = future.exp().clamp(1.0, 1.2)
    unsafe = (A[:, None] < 0) & (r > 4.0)
    assert (unsafe & MASK.bool()).any()
    return mean(torch.where(unsafe, weight.clamp(0.8, 1.0), weight) * ppo(r, A[:, None]))


def covariance(logp: Tensor) -> Tensor:
    return ((A[:, None] - mean(A[:, None].expand(B, T))) * (logp - mean(logp))).detach()


def clip_cov(logp: Tensor) -> Tensor:
    """With a share of 1 all tokens in the range are chosen, whatever the order."""
    r = (logp - OLD).exp()
    chosen = (covariance(logp) > 0.2) & (covariance(logp) < 5.0) & (MASK > 0)
    chosen &= -A[:, None] * r.clamp(0.8, 1.2) <= -A[:, None] * r
    assert 0 < chosen.sum() < MASK.sum()
    return mean(ppo(r, A[:, None]) * ~chosen)


def kl_cov(logp: Tensor) -> Tensor:
    largest = covariance(logp).masked_fill(MASK == 0, -torch.inf).flatten().sort(descending=True).indices[:4]
    chosen = torch.zeros(B * T, dtype=torch.float64).index_fill(0, largest, 1.0).view(B, T)
    return mean(-(logp - OLD).exp() * A[:, None] + 0.7 * chosen * (logp - OLD).abs())


def vapo(logp: Tensor) -> Tensor:
    right = MASK * REWARDS[:, None]
    return mean(ppo((logp - OLD).exp(), A[:, None], 0.2, 0.28)) + 0.1 * mean(-logp, right)


def ref_kl(logp: Tensor) -> Tensor:
    x, advantage = logp - OLD, (REF - logp).detach()
    kept = logp.detach().exp() - OLD.exp() >= -0.02
    assert 0 < (kept * MASK).sum() < MASK.sum()
    return mean(-advantage * x.exp() * kept + 1e-3 * x**2)


def dpo(logp: Tensor) -> Tensor:
    """TRL's "sigmoid" loss: -log sigmoid(beta (pi_logratios - ref_logratios)), of sums over the completions."""
    sums, ref = torch.where(MASK[:DPO_ROWS] > 0, logp, 0.0).sum(-1), REF[:DPO_ROWS, 0]
    pi_logratios, ref_logratios = sums[:2] - sums[2:], ref[:2] - ref[2:]
    return -torch.nn.functional.logsigmoid(0.3 * (pi_logratios - ref_logratios)).mean()


def espo(logp: Tensor) -> Tensor:
    """ESPO, arXiv:2512.03759: the bound of a completion is a sum over the masked tokens of its views."""
    ratio = (((logp * SCALE * MASK).sum(1) - OLD_ELBOS) / 10).exp()
    assert (ratio > 1.2).any() and (ratio < 0.8).any()
    return ppo(ratio, A).mean()


SCALE = 1 / (0.2 + torch.rand(B, T, generator=G, dtype=torch.float64))
OLD_ELBOS = (LOGPS * SCALE * MASK).sum(1) + torch.tensor([0.0, -4.0, 4.0, 1.0, -1.0])
EACH = A[:, None].expand(B, T)
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "topr_loss": (topr, (A, REWARDS, OLD), {}),
    "fipo_loss": (fipo, (A, OLD), {}),
    "clip_cov_loss": (clip_cov, (EACH, OLD), dict(share=1.0, low=0.2)),
    "kl_cov_loss": (kl_cov, (EACH, OLD), dict(share=4 / float(MASK.sum()) + 1e-9, coefficient=0.7)),
    "vapo_loss": (vapo, (EACH, REWARDS > 0, OLD), {}),
    "ref_kl_loss": (ref_kl, (REF, OLD), dict(drop=0.02)),
    "espo_loss": (espo, (SCALE, torch.full((B,), 10.0), A, OLD_ELBOS), {}),
    "dpo_loss": (dpo, (REF[:DPO_ROWS, 0],), dict(beta=0.3)),
}


def test_each_loss_has_a_formula():
    assert FUNCTIONS.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_formula(name):
    formula, given, options = CASES[name]
    hidden, ids, mask = (x[: DPO_ROWS if name == "dpo_loss" else B] for x in (HIDDEN, IDS, MASK))
    leaves = [x.clone().requires_grad_() for x in (hidden, WEIGHT)]
    expected = formula((leaves[0] @ leaves[1].T).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1))
    right = torch.autograd.grad(expected, leaves)
    for rows in (None, 9):
        own = [x.clone().requires_grad_() for x in (hidden, WEIGHT)]
        chunks = {} if "cov" in name or name == "dpo_loss" else {"chunk_rows": rows}  # fused_logps has no chunk_rows
        loss = FUNCTIONS[name](own[0], own[1], ids, mask, *given, **options, **chunks)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(loss, own), right, rtol=1e-8, atol=1e-11)


# --- examples/countdown.py --------------------------------------------------------------------------------------------


ROWS = [  # create_dataset("countdown", size=2, seed=0, min_numbers=3, max_numbers=4), without the difficulty
    {
        "question": f"{words} using all of these numbers: {', '.join(map(str, numbers))}.", "answer": expression,
        "metadata": {"numbers": numbers, "target": target, "expression": expression},
    }
    for words, numbers, target, expression in (
        ("Calculate 520", [10, 40, 13, 10], 520, "40*13*10/10"),
        ("Find a way to make 116", [71, 33, 12], 116, "12 + 71 + 33"),
    )
]  # fmt: skip
# 1.0: right; 0.05: an expression that is not; 0.01: no expression. The package runs the answer: what the example does
# not pass on to it has 0.
SCORES = {ROWS[0]["answer"]: 1.0, "1 + 1": 0.05, "1/0": 0.01, "(": 0.01}
NOT_PASSED_ON = ["", "It is 5", "9**9**9**9", "__import__('os').abort()", "1" * 101]


@pytest.fixture
def countdown(monkeypatch):
    if importlib.util.find_spec("reasoning_gym") is None:
        recorded = ModuleType("reasoning_gym")
        recorded.create_dataset = lambda name, size, seed, min_numbers, max_numbers: ROWS[:size]
        recorded.get_score_answer_fn = lambda name: lambda answer, entry: SCORES[answer]
        monkeypatch.setitem(sys.modules, "reasoning_gym", recorded)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "countdown", raising=False)
    return importlib.import_module("countdown")


def test_the_rows_and_their_rewards(countdown, tmp_path):
    countdown.write_tasks(tmp_path / "countdown.jsonl", size=2)
    rows = [json.loads(line) for line in (tmp_path / "countdown.jsonl").read_text().splitlines()]
    for row, recorded in zip(rows, ROWS, strict=True):
        assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith(recorded["question"])
        assert recorded["metadata"].items() <= row["metadata"].items()

    expected = SCORES | dict.fromkeys(NOT_PASSED_ON, 0.0)
    completions = [[{"role": "assistant", "content": text}] for text in expected]
    count = len(completions)
    columns = {"metadata": [rows[0]["metadata"]] * count}
    batch = Rewards(["countdown:solved"]).score(
        prompts=[rows[0]["prompt"]] * count, completions=completions, completion_ids=[[1]] * count, columns=columns,
        step=0,
    )  # fmt: skip
    assert batch.total.tolist() == pytest.approx(list(expected.values())) and not batch.failures


# --- examples/run_program.py ------------------------------------------------------------------------------------------

ADDS = "print(sum(map(int, input().split())))"
PROGRAMS = {  # 1.0: it prints 3
    ADDS: 1.0, f"It adds:\n```python\n{ADDS}\n```\nDone.": 1.0, "print(4)": 0.0, "print(3)\n1 / 0": 0.0,
    "while True: pass": 0.0, "print(3)\nwhile True: print('x' * 10**6)": 0.0, "print(3)\nbytearray(2 << 30)": 0.0,
    "import time\nprint(3, flush=True)\ntime.sleep(1000)": 0.0,
    "import os\nassert not os.environ.keys() - {'LC_CTYPE'} and os.listdir() == ['program.py']\nprint(3)": 1.0,
    # What it has started ends with it.
    "import os, time\nif os.fork() == 0:\n  time.sleep(2)\n  open('LATE', 'w')\nelse: print(3)": 1.0,
}  # fmt: skip


def test_programs_run_under_limits(tmp_path, monkeypatch):
    example = load("run_program")
    monkeypatch.setattr(example, "WALL_SECONDS", 5)
    programs = [program.replace("LATE", str(tmp_path / "late")) for program in PROGRAMS]
    count = len(programs)
    assert example.passes(programs, ["1 2\n"] * count, ["3"] * count) == list(PROGRAMS.values())
    assert example.passes([[{"role": "assistant", "content": ADDS}]], ["1 2"], ["3"]) == [1.0]
    assert not (tmp_path / "late").exists()


# --- the commands of docs/trainers ------------------------------------------------------------------------------------

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?")


def sessions(page: str) -> list[tuple[list[str], list[str]]]:
    """The commands of a page, as words, each with the lines that it ends with."""
    text = (ROOT / "docs" / "trainers" / page).read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, *output = part.splitlines()
            found.append((shlex.split(command), output))
    return found


@pytest.mark.parametrize("page", ["trl.md", "verl.md", "loop.md"])
def test_the_commands_of_a_page_end_with_the_lines_that_it_shows(page, tmp_path, monkeypatch, capsys, request):
    """But for the numbers; runs of TRL have two steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)  # as for a script of this folder
    monkeypatch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)  # verl replaces it
    if page == "verl.md":
        verl_package.install(monkeypatch)
    if page == "trl.md":
        pytest.importorskip("trl", reason="trl is not installed: run make test")
        request.addfinalizer(importlib.import_module("grpo_kernels.integrations.trl").unpatch_trl)
    for (python, script, *arguments), lines in sessions(page):
        assert python == "python" and lines
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(sys, "argv", [script, *("2" if word in ("40", "100") else word for word in arguments)])
        runpy.run_path(str(ROOT / script), run_name="__main__")
        printed = capsys.readouterr().out.splitlines()[-len(lines) :]
        assert [NUMBER.sub("0", line) for line in printed] == [NUMBER.sub("0", line) for line in lines]
    if page == "verl.md":
        losses, clipped = zip(
            *(map(float, re.findall(r"[-+]\d\.\d+|\d+\.\d(?=%)", x)) for x in printed[1:]), strict=True
        )
        assert sorted(losses, reverse=True) == [*losses] and sorted(clipped) == [*clipped] and clipped[0] == 0.0


@pytest.mark.parametrize("page", ["prime-rl.md", "others.md"])
def test_the_tests_that_a_page_names_are_there(page):
    ((words, lines),) = sessions(page)
    *files, _, selected = words[4:]
    assert words[:4] == ["python", "-m", "pytest", "-q"] and len(lines) == 1
    names = [
        f"{file}:{name}" for file in files
        for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]  # fmt: skip
    for word in selected.split(" or "):
        assert any(word in name for name in names), word
