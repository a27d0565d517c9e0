"""The trainer on saved rollouts: each step's loss and gradient norm are TRL's, and two processes' are one's."""

from __future__ import annotations

import contextlib
import json
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")

import torch
import training
import trl_parity
from ranks import run_ranks
from safetensors.torch import load_file

from grpo_kernels.trainer import model as policy
from grpo_kernels.trainer.arguments import parse
from grpo_kernels.trainer.commands import train as train_command
from grpo_kernels.trainer.model import load_model

TOLERANCE = 2e-5
STEPS = 4  # two rollouts, each used twice
# What both trainers are told. They share the names of their options; where defaults differ, neither is left to its own.
COMMON: dict[str, Any] = dict(
    per_device_train_batch_size=8, gradient_accumulation_steps=1, num_iterations=2, num_generations=4,
    max_completion_length=8, max_steps=STEPS, learning_rate=3e-3, lr_scheduler_type="constant", temperature=0.9,
    loss_type="dapo", importance_sampling_level="token", epsilon=0.1, epsilon_high=0.15, scale_rewards="group",
    use_bias_correction_kl=False, seed=1,
    eps=1e-5,  # gradients that are 0 up to rounding would become steps of the learning rate
)  # fmt: skip
LOSS_OPTIONS = ("importance_sampling_level", "delta", "use_bias_correction_kl", "off_policy_mask_threshold",
                "entropy_coef")  # fmt: skip


def train(output: Path, rollouts: Path | None = None, **options: Any) -> list[dict[str, Any]]:
    """The records of log.jsonl, one per step, of a run in this process. rollouts: a run whose completions it takes."""
    with training.replayed(rollouts) if rollouts else contextlib.nullcontext():
        assert train_command(command_line(output, **(REPLAYED if rollouts else {}) | options)) == 0
    return training.steps(output)


def command_line(output: Path, *, family: str = "llama", **options: Any) -> list[str]:
    data = output.with_name("prompts.jsonl")
    rows = ({"prompt": x, "expert": experts_of_prompts()[i % 2]} for i, x in enumerate(trl_parity.prompts()["prompt"]))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = dict(
        output_dir=output, model_name_or_path=trl_parity.saved_model(family), dataset_name=data, use_cpu=True,
        save_steps=0, reward_funcs="trl_parity:reward",
    )  # fmt: skip
    given = {**COMMON, **own, **options}
    given["optim_args"] = {name: given.pop(name) for name in ("betas", "eps") if name in given}
    given["loss_options"] = {name: value for name in LOSS_OPTIONS if (value := given.pop(name, None))}
    return [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name}", *([json.dumps(value)] if isinstance(value, (bool, dict)) else listed(value)))
    ]


def listed(value: Any) -> list[str]:
    return [*map(str, value)] if isinstance(value, list) else [str(value)]


def experts_of_prompts() -> list[str]:
    return [trl_parity.saved_model(family) for family in ("qwen2", "gemma2")]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Path:
    """A run with rollouts of groups of 4, some completions without an end."""
    output = tmp_path_factory.mktemp("rollouts") / "run"
    train(output, num_iterations=1)
    rows = [row for rollout in training.rollouts(output) for row in rollout]
    assert {row.ended for row in rows} == {True, False}
    end = trl_parity.tokenizer().eos_token_id  # the one that TRL knows: others at full length it takes for truncated
    assert not any(row.ended and row.ids[-1] != end for row in rows if len(row.ids) == 8), "choose another seed"
    assert len({len(row.prompt_ids) for row in rows}) > 1 and len({len(row.ids) for row in rows}) > 3
    return output


def train_trl(output: Path, rollouts: Path, *, family: str = "llama", **options: Any) -> list[dict[str, Any]]:
    """What TRL's trainer logs for each step, where a rollout is what `rollouts` holds."""
    from trl import GRPOTrainer

    saved_rollouts = iter(training.rollouts(rollouts))

    def replayed(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rows = next(saved_rollouts)
        assert len(rows) == len(prompts)
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.ids for row in rows],
            "logprobs": [row.logps.tolist() for row in rows],
            "saved": [row.reward for row in rows],
        }

    def saved_reward(saved: list[float], **_: Any) -> list[float | None]:
        return [None if math.isnan(x) else x for x in saved]

    model = load_model(trl_parity.saved_model(family), parse(command_line(output, family=family, **options)))
    given = {**COMMON, "optim": "adamw_torch", "weight_decay": 0.0, **options}
    own = ("use_peft", "lora_r", "share_prompts")
    given = {name: x for name, x in given.items() if x is not None and name not in own}
    given |= {"adam_epsilon": given.pop("eps")}
    given |= dict(zip(("adam_beta1", "adam_beta2"), given.pop("betas", ()), strict=False))
    given |= {"sync_ref_model": "ref_model_sync_steps" in given, "ref_model_mixup_alpha": 0.6}
    args = trl_parity.trl_arguments(str(output), **given)
    trainer = trl_parity.construct(
        GRPOTrainer, family, model=model, args=args, reward_funcs=saved_reward, rollout_func=replayed,
        train_dataset=trl_parity.prompts(),
    )  # fmt: skip
    if "vllm_importance_sampling_mode" in options:  # as if vLLM had sampled, which takes a GPU
        trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
    return [entry for entry in trl_parity.result_of(trainer)["log"] if "loss" in entry]


def largest_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]], steps: int = STEPS) -> float:
    """Of a loss or a gradient norm, relative to the larger of its size and 1e-1."""
    assert len(found) == len(expected) == steps
    return max(
        abs(mine[name] - other[name]) / max(abs(other[name]), 1e-1)
        for mine, other in zip(found, expected, strict=True)
        for name in ("loss", "grad_norm")
    )


REPLAYED = dict(use_vllm=True, vllm_importance_sampling_mode="none")
_TWO_PASSES = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
_NO_CLIPPING = dict(epsilon=None, epsilon_high=None)
_CORRECTED = dict(vllm_importance_sampling_clip_max=1.05)
CASES: dict[str, dict[str, Any]] = {
    "dapo": dict(**_TWO_PASSES),
    "shared prompts": dict(share_prompts=True, beta=0.1, **_TWO_PASSES),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02, beta=0.1, **_TWO_PASSES),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none", beta=0.1, **_TWO_PASSES),
    "cispo": dict(loss_type="cispo", epsilon=None, epsilon_high=1.1, beta=0.1, **_TWO_PASSES),
    "sapo": dict(loss_type="sapo", beta=0.1, **_NO_CLIPPING, **_TWO_PASSES),
    "vespo": dict(loss_type="vespo", beta=0.1, **_NO_CLIPPING, **_TWO_PASSES),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", beta=0.1, **_TWO_PASSES),
    # TRL divides by the tokens of each pass, the trainer by those of the step: the same where a step is one pass.
    "bnpo": dict(loss_type="bnpo", beta=0.1),
    "entropy bonus, reference that follows": dict(
        entropy_coef=0.05, beta=0.1, ref_model_sync_steps=2
    ),
    "delta, scale by the batch": dict(delta=1.18, scale_rewards="batch"),
    "truncated completions masked, KL with bias correction": dict(
        mask_truncated_completions=True, beta=0.1, use_bias_correction_kl=True
    ),
    "off-policy mask": dict(off_policy_mask_threshold=0.01),
    "schedule, gradient clipping, checkpointing and AdamW": dict(
        lr_scheduler_type="linear", warmup_steps=1, max_grad_norm=0.3, betas=[0.8, 0.9], eps=1e-4,
        gradient_checkpointing=True,
    ),
    "correction, token_mask": dict(vllm_importance_sampling_mode="token_mask", **_CORRECTED),
    "correction, sequence_truncate": dict(vllm_importance_sampling_mode="sequence_truncate", **_CORRECTED),
    "a softcap": dict(family="gemma2", loss_type="grpo", beta=0.1, **_TWO_PASSES),
    "a bias of the logits": dict(family="phi", loss_type="grpo", beta=0.1, **_TWO_PASSES),
    "LoRA": dict(use_peft=True, lora_r=4, learning_rate=1e-2, beta=0.1, **_TWO_PASSES),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_steps_on_saved_rollouts_equal_trls(case, rollouts, tmp_path, monkeypatch):
    shared, forward = set(), policy.fused_forward
    monkeypatch.setattr(policy, "fused_forward", lambda *a, **b: (shared.add(b["share_prompts"]), forward(*a, **b))[1])
    expected = train_trl(tmp_path / "trl", rollouts, **CASES[case])
    found = train(tmp_path / "own", rollouts, **CASES[case])
    assert largest_difference(found, expected) < TOLERANCE
    assert sum(record["grad_norm"] > 0.01 for record in found) >= STEPS / 2
    assert shared == {"share_prompts" in CASES[case]}
    if "clip_ratio/region" in found[1]:
        assert max(record["clip_ratio/region"] for record in found) > 0.05  # ratios leave the clip range


UNSCORED = [(1,), (0, 6, 7), (4, 5, 6, 7)]


def some(completion_ids, trainer_state, **columns):
    """The reward of the rollouts, but for some completions of a group, and in another rollout a whole group."""
    left = UNSCORED[trainer_state.global_step % 3]
    return [None if i in left else x for i, x in enumerate(trl_parity.reward(completion_ids))]


def test_steps_with_unscored_completions_equal_trls(rollouts, tmp_path):
    for index, rows in enumerate(training.rollouts(rollouts)):
        for i in UNSCORED[index % 3]:
            rows[i].reward = math.nan
        training.write_rollout(tmp_path / "changed", index, rows)
    options = dict(loss_type="grpo", num_iterations=1, **_TWO_PASSES)
    expected = train_trl(tmp_path / "trl", tmp_path / "changed", **options)
    found = train(tmp_path / "own", rollouts, reward_funcs="test_trainer_parity:some", **options)
    assert [record["unscored"] for record in found[:3]] == [1, 3, 4]
    assert largest_difference(found, expected) < TOLERANCE


# ---- processes ------------------------------------------------------------------------------------------------------

# Completions of unequal lengths fall on different ranks and passes: sums have to be divided by what all have together.
_HALF = dict(per_device_train_batch_size=2)
PROCESSES: dict[str, dict[str, Any]] = {
    "dapo": dict(
        beta=0.1,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=1.05,
        rollout_is_batch_normalize=True,
        rollout_rs={"token_k1": [0.9, 1.2]},
    ),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02),
    "entropy bonus": dict(entropy_coef=0.05, scale_rewards="batch", share_prompts=True),
    "truncated completions masked": dict(mask_truncated_completions=True),
    "reference that follows": dict(beta=0.1, ref_model_sync_steps=2, gradient_checkpointing=True, max_grad_norm=0.3),
    "LoRA": dict(use_peft=True, beta=0.1, learning_rate=1e-2, share_prompts=True),
}


# How processes share the work: the options, and the cases.
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "DDP": ({}, [*PROCESSES, "teachers"]),
    "FSDP2": ({"fsdp": True}, ["dapo", "entropy bonus", "reference that follows", "LoRA", "teachers"]),
}


# Errors of one process, signals, evaluation.
FOUR_STEPS = {"max_steps": 4, "save_steps": 1, "num_iterations": 2, "steps_per_generation": 2, "beta": 0.1,
              "per_device_train_batch_size": 4, "reward_funcs": "trainer_ranks:length"}  # fmt: skip
ENDS: dict[str, tuple[int, dict[str, Any]]] = {  # exit status and options
    "short": (1, {"reward_funcs": "trainer_ranks:short_on_rank_1"}),
    "raises": (0, {"reward_funcs": "trainer_ranks:raises_on_rank_1", "max_steps": 1}),
    "raises twice": (1, {"reward_funcs": "trainer_ranks:raises_on_rank_1", "max_steps": 8}),
    "broken": (1, {"reward_funcs": "trainer_ranks:breaks_rank_1"}),
    "broken shard": (1, {"reward_funcs": "trainer_ranks:breaks_rank_1", "fsdp": True}),
    "signal": (143, {"reward_funcs": "trainer_ranks:signals_rank_1"}),
    "three held out": (0, {"eval_num_samples": 2, "max_steps": 1}),
    "dry run": (
        0, {"dry_run": True, "model_name_or_path": None, "dataset_name": None, "reward_funcs": "arithmetic"}
    ),
}  # fmt: skip
# Two machines with disks of their own: exit status, options, and the one that names a path which rank 1 lacks.
OWN_DISKS: dict[str, tuple[int, dict[str, Any], str]] = {
    "new": (0, {"max_steps": 1}, "output_dir"),
    "start model": (
        2, {"model_name_or_path": None, "dataset_name": None, "reward_funcs": "arithmetic"}, "output_dir"
    ),
    "signal": (  # which has left a checkpoint
        2, {"resume_from_checkpoint": "auto", "reward_funcs": "trainer_ranks:signals_rank_1"}, "output_dir"
    ),
    "no model": (2, {}, "model_name_or_path"),
    "no data": (2, {}, "dataset_name"),
}  # fmt: skip


@pytest.mark.slow
def test_pitfall_14_two_processes_take_the_steps_of_one_and_end_together(rollouts, model, data, tmp_path):
    """All runs share two processes."""
    import trainer_ranks

    experts = dict(teacher_model_name_or_path=experts_of_prompts(), teacher_column="expert")
    distilled = {"teachers": dict(experts, teacher_top_k=8)}  # of which a rank has the samples of one in a pass
    one = {name: _TWO_PASSES | options for name, options in (PROCESSES | distilled).items()}
    # A checkpoint in the middle of a rollout, with a reference policy that has moved.
    saved = dict(num_generations=8, max_steps=6, save_steps=3, save_total_limit=9, beta=0.1, ref_model_sync_steps=2,
                 lr_scheduler_type="linear", top_k=9, **_TWO_PASSES)  # fmt: skip
    jobs = []
    for kind, (own, compared) in KINDS.items():
        resumed = dict(saved, resume_from_checkpoint=tmp_path / f"{kind}, saved" / "checkpoint-3")
        cases = {name: REPLAYED | one[name] for name in compared} | {"saved": saved, "resumed": resumed}
        for name, options in cases.items():
            argv = command_line(tmp_path / f"{kind}, {name}", **{**options, **_HALF, **own})
            jobs.append(trainer_ranks.Job(f"{kind}, {name}", argv, rollouts if name in one else None))
    low = dict(_HALF, fsdp=True, dtype="bfloat16", learning_rate=1e-6)
    for name, resume in (("bfloat16", None), ("bfloat16, resumed", tmp_path / "bfloat16" / "checkpoint-3")):
        argv = command_line(tmp_path / name, **{**saved, **low, "resume_from_checkpoint": resume})
        jobs.append(trainer_ranks.Job(name, argv))
    for name, (_, options) in ENDS.items():
        held_out = training.make_data(tmp_path / "three.jsonl", rows=3) if name == "three held out" else None
        argv = training.arguments(model, data, tmp_path / name, **FOUR_STEPS | options, eval_dataset_name=held_out)
        argv.remove("--use-cpu")  # which a machine without a GPU does not need
        jobs.append(trainer_ranks.Job(name, argv))
    for name, (_, options, lacking) in OWN_DISKS.items():
        argv = training.arguments(model, data, tmp_path / name, **FOUR_STEPS | options)
        argv.remove("--use-cpu")
        jobs.append(trainer_ranks.Job(f"{name}, own disks", argv, of_rank_1=(f"--{lacking}", str(tmp_path / "disk"))))
    run_ranks(partial(trainer_ranks.all_of_them, folder=tmp_path, jobs=jobs), 2, tmp_path)
    said = "".join((tmp_path / f"said-{rank}.txt").read_text() for rank in (0, 1))
    statuses = {job.name: 0 for job in jobs} | {name: status for name, (status, _) in ENDS.items()}
    statuses |= {f"{name}, own disks": status for name, (status, *_) in OWN_DISKS.items()}
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == statuses
    check_ends(tmp_path, said)
    states = [
        torch.load(tmp_path / name / "checkpoint-6" / "state.pt", weights_only=True)["optimizer"]["state"]
        for name in ("bfloat16", "bfloat16, resumed")
    ]
    for name, state in states[0].items():  # its float32 weights and moments, put together from both ranks
        assert state["master"].dtype == torch.float32 and state["exp_avg"].any()
        assert all(torch.equal(x, states[1][name][key]) for key, x in state.items()), name
    assert weights_differ(tmp_path / "bfloat16", tmp_path / "bfloat16, resumed") == 0.0
    for name, options in one.items():
        expected = train(tmp_path / f"one, {name}", rollouts, **options)
        assert ("rollout_rs" in options) == any(record.get("rollout_weight/dropped") for record in expected)
        for folder in (tmp_path / f"{kind}, {name}" for kind, (_, compared) in KINDS.items() if name in compared):
            check_steps(folder, expected)
            assert weights_differ(folder, tmp_path / f"one, {name}") < TOLERANCE, folder
    for kind in KINDS:
        check_sampled(tmp_path / f"{kind}, saved")
        before, after = (training.steps(tmp_path / f"{kind}, {name}") for name in ("saved", "resumed"))
        assert [(x["loss"], x["grad_norm"], x["kl"]) for x in after] == [
            (x["loss"], x["grad_norm"], x["kl"]) for x in before[3:]
        ]
        assert weights_differ(tmp_path / f"{kind}, resumed", tmp_path / f"{kind}, saved") == 0.0


def check_ends(folder: Path, said: str) -> None:
    # An error of one ends both, and not the timeout of the process group, which is longer than this test's.
    sentence = "reward 'short_on_rank_1' returned 7 values, expected 8, one for each completion"
    assert f"grpo-kernels train: {sentence}" in said
    assert f"grpo-kernels train: rank 1 failed: RunError: {sentence}" in said
    # A reward that fails in one: its completions are unscored, and that is said.
    assert training.steps(folder / "raises")[0]["unscored"] == 8
    assert "8 completions unscored, the first by raises_on_rank_1: KeyError: 'only here'" in said
    assert said.count("failed for every completion of step 1 on rank 1 of 2; its own traceback") == 2
    # In a second rollout it ends the run, with its own traceback.
    assert [step["unscored"] for step in training.steps(folder / "raises twice")] == [8] * 4
    reason = "failed for every completion of step 5 on rank 1 of 2, as in the rollout before; its own traceback"
    assert said.count(reason) == 2 and said.count('raise KeyError("only here")') >= 4
    # What is broken in one is saved by none.
    for name in ("broken", "broken shard"):
        assert {path.name for path in (folder / name).glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    assert said.count("after step 4 the norm of the optimizer's state is inf; the run ends here") == 4
    # A signal to one stops both.
    assert not (folder / "signal" / "model").exists()
    assert [path.name for path in (folder / "signal").glob("checkpoint-*")] == ["checkpoint-1"]
    # Three held-out prompts for two ranks, and a metric that is the mean over them.
    found = [record["evaluation"] for record in training.records(folder / "three held out", "evaluation")]
    assert [(e["problems"], e["samples"]) for e in found] == [(3, 2), (3, 2)]
    assert training.steps(folder / "three held out")[0]["metrics/rank"] == 0.5
    assert not (folder / "dry run").exists() and said.count("one step   rollout") == 1
    # A machine with a disk of its own needs no output folder, and says what it needs.
    assert training.steps(folder / "new") and not (folder / "disk").exists()
    for first, other in (("start-model-0 there", "start-model-0 missing"), ("checkpoint-1 (", "no checkpoint")):
        assert len(re.findall(rf"finds {re.escape(first)}.*, rank 1 on .* {other}; expected a disk that", said)) == 2
    for option in ("model_name_or_path", "dataset_name"):
        assert f"grpo-kernels train: {option}={folder / 'disk'}" in said
        assert f"grpo-kernels train: rank 1 failed: ValueError: {option}={folder / 'disk'}" in said


def check_steps(folder: Path, expected: list[dict[str, Any]]) -> None:
    found = training.steps(folder)
    assert largest_difference(found, expected, len(expected)) < TOLERANCE, folder
    for mine, other in zip(found, expected, strict=True):  # each number that is logged, not only these two
        for key, x in other.items():
            if isinstance(x, float) and "second" not in key:
                assert mine[key] == pytest.approx(x, rel=TOLERANCE, abs=TOLERANCE), (folder, key)


def weights_differ(found: Path, expected: Path) -> float:
    """The largest relative difference, by norm, of a tensor of the saved models."""
    (mine,), (other,) = (list((folder / "model").glob("*.safetensors")) for folder in (found, expected))
    mine, other = load_file(mine), load_file(other)
    assert mine.keys() == other.keys()
    return max(((mine[name] - x).norm() / x.norm().clamp(min=1e-6)).item() for name, x in other.items())


def check_sampled(output: Path) -> None:
    """Two ranks sampled one prompt: not the same completions, and from the distribution that the loss scores."""
    records = training.steps(output)
    for index, rows in enumerate(training.rollouts(output)):
        assert [row.ids for row in rows[:4]] != [row.ids for row in rows[4:]]
        assert {tuple(row.prompt_ids) for row in rows} == {tuple(rows[0].prompt_ids)}
        assert {len(ids) for row in rows for ids in row.kept} == {9}
        assert records[2 * index]["log_ratio_first_max"] == 0.0
        assert records[2 * index]["rollout_mismatch/max"] < 1e-4
