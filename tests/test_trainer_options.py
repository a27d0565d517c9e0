"""Every option of the trainer that changes a step, and what a run leaves."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import training
from accelerate.state import AcceleratorState
from tiny_models import WORD_PROBLEMS, tiny_chat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training import rollouts, run, steps
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl.trainer import grpo_trainer

from grpo_kernels import GRPOConfig, available_presets
from grpo_kernels.commands.cli import main
from grpo_kernels.trainer import train
from grpo_kernels.trainer.adamw import MasterAdamW, make_optimizer
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.arithmetic import start_model
from grpo_kernels.trainer.batch import denominators, step_ends
from grpo_kernels.trainer.log import TRL_NAMES
from grpo_kernels.trainer.rollout import Completion
from grpo_kernels.trainer.teachers import Teachers, _tensors

# Those that test_trainer_parity.py does not compare with TRL's.
COMPARED = {"dapo", "bnpo", "cispo", "dr_grpo", "grpo", "luspo", "sapo", "vespo"}
DISTINCT = {GRPOConfig.preset(name).key: name for name in available_presets() if name not in COMPARED}
LOSSES = {preset: {"loss_type": preset} for preset in DISTINCT.values()}
LOSSES["gmpo"] = {"loss_type": "bnpo", "loss_options": {"surrogate": "gmpo"}}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_makes_steps(loss, trained):
    records = steps(trained(num_iterations=2, reward_funcs="training:length", **LOSSES[loss]))
    assert len(records) == 3 and all(math.isfinite(r["loss"]) for r in records)
    assert records[0]["grad_norm"] > 0 and records[2]["grad_norm"] > 0  # in between all may be clipped


def test_the_eager_loss_takes_the_same_steps(trained):
    options = {"beta": 0.1, "num_iterations": 2, "temperature": 0.8, "loss_options": {"entropy_coef": 0.01}}
    found = [steps(trained(loss, loss=loss, reward_funcs="training:length", **options)) for loss in ("fused", "eager")]
    for a, b in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy", "reward", "ratio/max"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name


def test_sparse_gradients_are_counted(trained):
    for record in steps(trained(loss_options={"sparse_backward": 0.01}, reward_funcs="training:length")):
        assert record["sparse/kept"] >= 0 and 0 <= record["sparse/dense"] <= 1 and math.isfinite(record["grad_norm"])


# --- a teacher --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another model with the ids of `model`, of another width."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    start_model(folder, seed=3, vocab_size=32, hidden_size=48, num_layers=1, max_steps=4, quiet=True)
    return folder


@pytest.mark.parametrize(
    ("divergence", "ids"),
    [("reverse_kl", {}), ("jsd", {}), ("jsd", {"teacher_top_k": 8}),
     ("forward_kl", {"teacher_top_k": 8, "teacher_top_k_mode": "renormalize"})],
)  # fmt: skip
def test_a_teacher_alone_draws_the_policy_to_it(divergence, ids, teacher, trained):
    """Without rewards: they are neither computed nor logged, and none of their alarms is raised."""
    options = {"reward_funcs": None, "max_steps": 12, "teacher_model_name_or_path": teacher, **ids}
    options["loss_options"] = {"divergence": divergence}
    records = steps(trained(per_device_train_batch_size=16, **options))
    found = [record["divergence"] for record in records]
    assert found[-1] < 0.8 * found[0] and records[0]["loss"] == pytest.approx(found[0], rel=1e-4)
    assert not any("reward" in record for record in records)
    assert ("divergence/mass" in records[0]) == (ids == {"teacher_top_k": 8})
    alarms = [alarm["kind"] for record in records for alarm in record.get("warnings", [])]
    assert set(alarms) <= {"truncation"}  # which this model earns


def test_more_ids_than_there_are_for_a_teacher(model, data, teacher, tmp_path, capsys):
    options = {"teacher_model_name_or_path": teacher, "teacher_top_k": 1000}
    assert training.run(model, data, tmp_path / "run", **options) != 0
    assert "teacher_top_k=1000: Teacher.top_k=1000; expected at most" in capsys.readouterr().err


def test_rewards_beside_a_teacher(teacher, trained):
    """The loss is that of the rewards plus the weighted divergence. And such a run resumes to the bit."""
    options = {"reward_funcs": "training:length", "loss_type": "dapo", "save_steps": 1}
    with_teacher = {"teacher_model_name_or_path": teacher, "loss_options": {"distill_coef": 0.3}}
    (plain, _), (both, _) = (
        steps(trained(name, max_steps=2, **options, **given))
        for name, given in {"plain": {}, "both": with_teacher}.items()
    )
    assert plain["reward"] == both["reward"] and "divergence" not in plain
    assert both["loss"] == pytest.approx(plain["loss"] + 0.3 * both["divergence"], rel=1e-4, abs=1e-6)
    trained("parts", max_steps=1, **options, **with_teacher)
    parts = trained("parts", max_steps=2, resume_from_checkpoint="auto", **options, **with_teacher)
    assert training.same_weights(parts.with_name("both"), parts)


# --- several teachers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(model, teacher, tmp_path_factory):
    """Two teachers by their last names, and rows that name them in turn."""
    folder = tmp_path_factory.mktemp("experts")
    paths = [shutil.copytree(source, folder / name) for name, source in (("sums", teacher), ("words", model))]
    rows = [{"prompt": f"{a}+{b}=", "expert": paths[0].name if (a + b) % 2 else str(paths[1])}
            for a in range(4) for b in range(3)]  # fmt: skip
    (data := folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths, data


def test_each_prompt_has_its_teacher(experts, trained):
    """The divergence of a step is that of each prompt to the teacher that it names, as a run with this one has it."""
    paths, data = experts
    # A rollout of two prompts, in one pass or two, under weights that do not move.
    options = {"dataset_name": data, "reward_funcs": None, "learning_rate": 1e-9}
    output = trained("both", **options, max_steps=3, teacher_model_name_or_path=paths, teacher_column="expert")
    halves = options | {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 6}
    alone = [steps(trained(path.name, **halves, teacher_model_name_or_path=path)) for path in paths]
    passes = set()
    for number, (record, rows) in enumerate(zip(steps(output), rollouts(output), strict=True)):
        found = [(sum(len(c.ids) for c in rows[i : i + 4]), rows[i].teacher) for i in (0, 4)]
        passes.add(len({teacher for _, teacher in found}))
        divergence = sum(
            tokens * alone[teacher][2 * number + half]["divergence"] for half, (tokens, teacher) in enumerate(found)
        )
        assert record["divergence"] == pytest.approx(divergence / sum(x for x, _ in found), rel=1e-4, abs=1e-6)
    assert passes == {1, 2}, "choose other rows"


def test_teachers_that_take_turns_and_a_run_that_resumes(experts, trained, monkeypatch, capfd):
    """To the bit: where memory has room for all, where one at a time has a copy, and inside of a rollout."""
    paths, data = experts
    options = {"dataset_name": data, "reward_funcs": "training:length", "num_iterations": 2, "save_steps": 1}
    options |= {"teacher_model_name_or_path": paths, "teacher_column": "expert"}
    whole = trained("whole", max_steps=3, **options)
    trained("parts", max_steps=1, **options)
    places, copied, take_turn = [], set(), Teachers._take_turn

    def recorded(teachers, path):
        for turn in (lambda *_: None, take_turn):
            turn(teachers, path)
            places.append([{x.data_ptr() for x in _tensors(lm)} for lm in teachers.models.values()])
        pairs = zip(places[0], places[-1], strict=True)
        copied.add(tuple("none" if x == y else "all" if x.isdisjoint(y) else "some" for x, y in pairs))

    with monkeypatch.context() as patched:
        patched.setattr("grpo_kernels.trainer.teachers.available", lambda device: 0)
        patched.setattr(Teachers, "_take_turn", recorded)
        parts = trained("parts", max_steps=3, resume_from_checkpoint="auto", **options)
    assert training.same_weights(whole, parts) and copied == {("all", "none"), ("none", "all")}
    assert "2 of 2 teachers stay in host memory and take turns on cpu" in capfd.readouterr().err


@pytest.mark.parametrize(("names", "column", "words"), [
    (["sums", "words"], "topic", "teacher_column=topic: the data has no such column; found 'expert'"),
    (["sums", "words", "sum"], "expert", "row 2: teacher_column=expert holds 'sum'; expected 'sums', 'words', '"),
    (["sums", "words", None], "expert", "row 2: teacher_column=expert holds None; expected"),
    (["sums", "sums"], "expert", "words: no prompt names it in teacher_column=expert; leave it out"),
    (["sums", "other ids"], "expert", "other ids: its tokenizer gives '"),
])  # fmt: skip
def test_teachers_that_do_not_fit(names, column, words, experts, model, tmp_path, capsys, monkeypatch):
    """Before the weights of a teacher are read."""
    monkeypatch.setattr("grpo_kernels.trainer.run.Teachers", lambda *_: pytest.fail("weights are read"))
    paths, data = experts[0], tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "expert": name}) + "\n" for i, name in enumerate(names)))
    if "other ids" in names:
        paths = [paths[0], shutil.copytree(paths[1], tmp_path / "other ids")]
        (file := paths[1] / "tokenizer.json").write_text(re.sub(r'(?<=")\d(?=": \d)', backwards, file.read_text()))
    options = {"teacher_model_name_or_path": paths, "teacher_column": column, "reward_funcs": None}
    assert run(model, data, tmp_path / "run", **options) == 2
    assert words in capsys.readouterr().err


def backwards(digit):
    return str(9 - int(digit[0]))


def test_adaptive_beta_follows_its_target(trained, monkeypatch):
    monkeypatch.setattr("grpo_kernels.trainer.loop.KL_HORIZON", 8)
    options = {"beta": 0.1, "reward_funcs": "training:length"}
    low, high = (
        [(r["beta"], r["loss"]) for r in steps(trained(f"{target}", kl_target=target, **options))]
        for target in (1e-6, 1e6)
    )
    assert [beta for beta, _ in low] == pytest.approx([0.1, 0.08, 0.096]) and low[1] == high[1]
    assert [beta for beta, _ in high] == pytest.approx([0.1, 0.08, 0.064]) and low[2][1] != high[2][1]


def test_rewards_of_steps(trained):
    """A completion without a verdict is out; a reward of the whole completion is the last step's."""
    options = {"reward_funcs": ["training:some_digits", "training:constant"], "step_delimiter": "+",
               "max_completion_length": 12, "per_device_train_batch_size": 32}  # fmt: skip
    (rollout,) = rollouts(trained(max_steps=1, **options))
    assert any(len(c.steps or []) > 1 for c in rollout)
    for i, c in enumerate(rollout):
        assert len(c.advantage) == len(c.ids)
        if i % 4 == 1:
            assert math.isnan(c.reward) and c.steps is None and not c.advantage.any()
            continue
        assert c.step_ends[-1] == len(c.ids) - 1
        for first, last in zip([-1, *c.step_ends], c.step_ends, strict=False):
            assert len(c.advantage[first + 1 : last + 1].unique()) <= 1  # constant within a step
        assert len(c.steps) == len(c.step_ends) and sum(c.steps) == pytest.approx(c.reward)
        if i % 4 == 2:  # the function of steps does not apply
            assert c.steps[:-1] == [0.0] * (len(c.step_ends) - 1)
            assert c.steps[-1] == 1.0


def test_what_reward_functions_log(trained):
    """Under names of its own: a function cannot replace the trainer's numbers. A date becomes text."""
    folder = trained(reward_funcs="training:logs", max_steps=2, num_iterations=2)
    record, sample = steps(folder)[1], json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert record["metrics/loss"] == 7.0 != record["loss"] and record["slowest_reward"] == "logs"
    assert sample["extra"]["reward"] == "2020-01-01" and isinstance(sample["reward"], float)


def tokenizer_of(kind):
    """Bytes, some of them joined across characters; words behind a blank, the first of which is stripped; bytes as a
    fallback. With an end that is a special token."""
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [
            ("a", "\u010a"),
            ("\u010a", "\u010a"),
            ("\u010a", "\u00c3"),
            ("\u00e3", "\u0122"),
        ]  # parts of characters
        made = Tokenizer(models.BPE({word: i for i, word in enumerate([*alphabet, *map("".join, merges)])}, merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    else:
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"ab\u2581", "\u2581a", "\u2581ab", "b\u2581"]
        merges = [("\u2581", "a"), ("\u2581a", "b"), ("b", "\u2581")]
        vocabulary = {word: i for i, word in enumerate(words)}
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
        ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_steps_are_those_of_the_text_whatever_its_tokens(kind):
    """As many as a split of the text finds; each ends with the first token with which its delimiter is whole."""
    tokenizer, rng = tokenizer_of(kind), random.Random(0)
    delimiters = ["\n", "\n\n", "\u3002", "\u2192", "\u00e9", " \u043a\u0438", " a", "b ", "\U0001f600", "aa"]

    def text_of(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    for _ in range(100):
        text = "".join(rng.choice([*delimiters, *"abab  \n"]) for _ in range(rng.randrange(12)))
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        for delimiter in delimiters:
            parts = text_of(ids).split(delimiter)
            parts = parts[:-1] if len(parts) > 1 and parts[-1] == "" else parts
            starts = [delimiter.join(parts[:i]) + delimiter for i in range(1, len(parts))]
            expected = [next(k for k in range(len(ids)) if text_of(ids[: k + 1]).startswith(start)) for start in starts]
            assert step_ends(ids, tokenizer, delimiter) == [*expected, len(ids) - 1], (text, delimiter)


@pytest.mark.parametrize("text", ["ab\n\u3002", "\u3002"])
def test_finding_steps_decodes_pieces_of_a_few_tokens(text):
    """Of characters, and of bytes that are none: behind the whole text the time would grow with its square."""
    tokenizer, read = tokenizer_of("bytes"), []
    ids = [*tokenizer("a\n")["input_ids"], *tokenizer(text)["input_ids"][-1 if text == "\u3002" else 0 :] * 1000]

    class Counts:
        def decode(self, part, **options):
            read.append(len(part))
            return tokenizer.decode(part, **options)

    assert step_ends(ids, Counts(), "\n")[0] == 0 and read[0] == len(ids)
    assert max(read[1:]) <= 20 and len(read) <= 2 * len(ids) + 1


def test_denominators_count_what_is_scored():
    def row(length, **options):
        return Completion(0, "", [1], {}, list(range(length)), **options)

    rows = [row(3, ended=True), row(5, ended=False), row(2, ended=True, dropped=True)]
    masked = TrainArguments(mask_truncated_completions=True)
    for name, expected in (("dapo", (3, 3)), ("bnpo", (3, 3)), ("grpo", (2, 3)), ("luspo", (2, 3))):
        assert denominators(rows, GRPOConfig.preset(name), masked) == expected
    fixed = GRPOConfig.preset("dr_grpo", max_completion_length=7)
    assert denominators(rows, fixed, TrainArguments()) == (14, 8)


def test_trackers_get_trls_names(trained, data, monkeypatch):
    told = []
    monkeypatch.setattr("accelerate.Accelerator.log", lambda self, values, step: told.append((step, values)))
    record = steps(trained(max_steps=1, learning_rate=3e-3, num_iterations=1, eval_dataset_name=data))[0]
    (_, before), (step, values), _ = told
    assert step == 1 and values["train/learning_rate"] == record["learning_rate"] == 3e-3
    pairs = {"train/frac_reward_zero_std": "zero_gradient_groups", "train/clip_ratio/region_mean": "clip_ratio/region"}
    for name, ours in {**pairs, "train/reward": "reward", "train/approx_kl": "approx_kl"}.items():
        assert values[name] == record[ours]
    assert before.keys() >= {"eval/reward", "eval/pass_at_1"} and all(name.startswith("eval/") for name in before)
    # TRL has them all.
    text = Path(grpo_trainer.__file__).read_text()
    assert [name for name in TRL_NAMES.values() if f'"{name}"' not in text] == []


def test_what_a_run_leaves_and_says(model, data, tmp_path, capfd):
    """A file gets lines and no progress bar."""
    folder = tmp_path / "new" / "run"
    options = {"eval_dataset_name": data, "eval_max_prompts": 4, "eval_steps": 2, "save_steps": 1, "max_steps": 5,
               "save_total_limit": 2, "logging_steps": 2}  # fmt: skip
    assert run(model, data, folder, **options) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= {"pass_at_1_before", "pass_at_1_after", "steps", "seconds"} and summary["steps"] == 5
    assert [record["step"] for record in training.records(folder, "evaluation")] == [0, 2, 4, 5]
    assert {p.name for p in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-5"}
    samples = (folder / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 5 * 4
    assert json.loads(samples[0]).keys() >= {"prompt", "completion", "reward"}
    assert (folder / "report.html").stat().st_size > 1000
    assert not list(folder.glob(".*"))
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert all(torch.equal(p, training.weights(folder)[n]) for n, p in reloaded.named_parameters())

    error = capfd.readouterr().err
    name, output = (re.escape(str(path)) for path in (model, folder))
    for line in (
        rf"{name}, 12 prompts, 4 held out; 5 steps of 8 completions, 1 process, cpu; output in {output}",
        r"step 0: held-out reward 0\.\d{3}, pass@1 0\.\d{3}, greedy 0\.\d{3}",
        r"step 2 of 5: reward \S+, entropy \S+, grad_norm \S+, \d+ s",
        r"step 4 of 5: .*",
        r"step 5: held-out reward .*",
        rf"{output}: model, summary.json and report.html after 5 steps",
    ):
        assert re.search(f"^{line}$", error, re.MULTILINE), (line, error)
    assert "\r" not in error and "GRPO" not in error and not re.search("step [135] of", error)


def test_a_reward_that_changes_the_working_directory(model, data, tmp_path, monkeypatch):
    """When it is imported, and when it is called: paths are those of the directory that the run was started in."""
    text = "import os\nos.chdir('/')\ndef ids(completion_ids, **_):\n    os.chdir('/tmp')\n"
    (tmp_path / "away.py").write_text(text + "    return [float(ids[0]) for ids in completion_ids]\n")
    (tmp_path / "other.py").write_text("def zero(completions, **_):\n    return [0.0] * len(completions)\n")
    shutil.copytree(model, tmp_path / "model")
    shutil.copy(data, tmp_path / "data.jsonl")
    options = {"model": Path("model"), "data": Path("data.jsonl"), "save_steps": 1, "max_steps": 4,
               "reward_funcs": ["away.py:ids", "other.py:zero"], "eval_dataset_name": "data.jsonl"}  # fmt: skip
    for name, further in (
        ("run", {"save_total_limit": 9}),
        ("resumed", {"resume_from_checkpoint": "run/checkpoint-2"}),
    ):
        monkeypatch.chdir(tmp_path)
        assert run(output=Path(name), **options | further) == 0
        monkeypatch.chdir(tmp_path)
        assert (Path(name) / "report.html").exists() and (Path(name) / "model").is_dir()
        assert json.loads((Path(name) / "config.json").read_text())["output_dir"] == name  # as given


def test_the_default_type_changes_nothing_and_another_seed_does(trained):
    options = {"reward_funcs": "training:digits", "max_completion_length": 12, "step_delimiter": "+"}
    first, other = trained("float32", **options), trained("seed", seed=2, **options)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert training.same_weights(first, trained("bfloat16", **options))
    finally:
        torch.set_default_dtype(torch.float32)
    assert not training.same_weights(first, other)


# --- weights of bfloat16 ----------------------------------------------------------------------------------------------


def share_changed(output, start):
    """Of the weights, counted in float32: what was trained, or its copy in the state of the optimizer."""
    (checkpoint,) = output.glob("checkpoint-*")
    state = torch.load(checkpoint / "state.pt", weights_only=True)["optimizer"]["state"]
    weights = {name.removeprefix("lm."): found.get("master") for name, found in state.items()}
    found = training.weights(output)
    for name, master in weights.items():
        assert master is None or torch.equal(master.bfloat16(), found[name])
    changed = [(start[name] != found[name] if x is None else start[name] != x) for name, x in weights.items()]
    return torch.cat([x.flatten() for x in changed]).float().mean().item()


def test_weights_of_bfloat16_learn_at_the_default_rate(model, data, trained, tmp_path):
    """A step of 1e-6 is less than half of the last bit of a bfloat16 weight above 5e-4."""
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "start")
    start.save_pretrained(tmp_path / "start")  # both begin with weights that bfloat16 has
    options = {"model_name_or_path": tmp_path / "start", "learning_rate": 1e-6, "max_steps": 20}
    runs = [trained(t, dtype=t, reward_funcs="training:length", **options) for t in ("float32", "bfloat16")]
    whole, low = (share_changed(output, start.float().state_dict()) for output in runs)
    assert whole > 0.9 and abs(low - whole) < 0.02, (whole, low)


@pytest.mark.parametrize("lora", [False, True])
def test_weights_of_bfloat16_go_on_to_the_same_bits(lora, model, data, tmp_path):
    """Of a model in memory, whatever --dtype says. LoRA's own weights are of float32, as peft makes them."""
    tokenizer, states = AutoTokenizer.from_pretrained(model), []
    for name, resume in (("whole", None), ("resumed", tmp_path / "whole" / "checkpoint-2")):
        given = {**training.OPTIONS, "output_dir": str(tmp_path / name), "use_cpu": True}
        given |= {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-4, "optim_args": {"eps": 1e-4}, "use_peft": lora}
        del given["reward_funcs"]
        args = TrainArguments(**given, resume_from_checkpoint=resume and str(resume))
        AcceleratorState._reset_state(reset_partial_state=True)
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        train(lm, training.length, str(data), args, processing_class=tokenizer)
        folder = tmp_path / name / "checkpoint-4"
        states.append(torch.load(folder / "state.pt", weights_only=True)["optimizer"]["state"])
    whole, resumed = states
    for name, state in whole.items():
        assert ("master" in state) != lora and all(x.dtype == torch.float32 for x in state.values())
        assert all(torch.equal(x, resumed[name][key]) for key, x in state.items()), name
    (a,), (b,) = (list((tmp_path / name / "model").glob("*.safetensors")) for name in ("whole", "resumed"))
    assert a.read_bytes() == b.read_bytes()


def test_float32_is_stepped_as_by_torch(model):
    """Also beside weights of fewer bits, as models keep their norms in float32."""
    options = TrainArguments(learning_rate=1e-2, optim_args={"weight_decay": 0.1})
    found = []
    for kind in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        norm, low = torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(7).to(kind))
        optimizer = make_optimizer([norm, low], options)
        assert isinstance(optimizer, MasterAdamW) == (kind is torch.bfloat16)
        for _ in range(3):
            norm.grad, low.grad = torch.randn(3, 5), torch.randn(7).to(kind)
            optimizer.step()
        found.append(norm.detach())
    assert torch.equal(*found)


# --- a chat model -----------------------------------------------------------------------------------------------------


def vowels(completions, **_):
    """A reward that differs between the completions of a model that solves nothing."""
    texts = [messages[0]["content"] for messages in completions]
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in texts]


def test_two_steps_on_one_rollout_of_the_word_problems(tmp_path):
    """The policy that samples is the one that is scored."""
    model, output = tiny_chat(tmp_path / "start"), tmp_path / "run"
    given = dict(
        reward_funcs=["gsm8k", "test_trainer_options:vowels"], reward_weights=[1, 0.5], per_device_train_batch_size=4,
        num_iterations=2, max_steps=2, max_completion_length=16, temperature=0.9, beta=0.1, learning_rate=1e-3,
        eval_dataset_name=WORD_PROBLEMS,
        eval_max_prompts=3, eval_num_samples=2, correct_at=1.0,  # that of gsm8k: vowels give less
    )  # fmt: skip
    assert run(model, WORD_PROBLEMS, output, **given) == 0
    first, second = steps(output)
    assert first["log_ratio_first_max"] == 0.0 and first["rollout_mismatch/max"] < 1e-3
    assert first["grad_norm"] > 0.0 and first["rewards/vowels/std"] > 0.0 and first["unscored"] == 0
    assert 0.0 <= first["rewards/gsm8k/mean"] <= 1.0
    assert first["kl"] == 0.0 and second["kl"] > 0.0  # the step has moved the policy
    sample = json.loads((output / "samples.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in sample["prompt"]] == ["system", "user"]
    saved, start = (AutoTokenizer.from_pretrained(folder) for folder in (output / "model", model))
    assert saved.chat_template == start.chat_template and saved.get_vocab() == start.get_vocab()
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == (0.0, 0.0)  # its weights are random
    saved, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (output / "model", model))
    assert saved.generation_config.to_dict() == start.generation_config.to_dict()
    assert not torch.equal(saved.lm_head.weight, start.lm_head.weight)
    words = ["--num-samples", "2", "--max-prompts", "3", "--reward-funcs", "gsm8k", "test_trainer_options:vowels"]
    assert main(["evaluate", str(output), *words]) == 0
