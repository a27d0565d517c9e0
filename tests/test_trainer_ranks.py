"""Two processes: resuming, errors of one of them, signals, evaluation. All runs share one torchrun, in one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import training

HERE = Path(__file__).parent
STEPS = {"max_steps": 4, "save_steps": 1, "num_iterations": 2, "steps_per_generation": 2, "beta": 0.1,
         "per_device_train_batch_size": 4, "reward_funcs": "trainer_ranks:length"}  # fmt: skip


def jobs(model, data, folder):
    def job(name, copy_of=None, **options):
        argv = training.arguments(model, data, folder / name, **STEPS | options)
        argv.remove("--use-cpu")  # which a machine without a GPU does not need
        return {"name": name, "argv": argv} | ({"copy_of": copy_of} if copy_of else {})

    saved = {"save_total_limit": 9}
    resumed = saved | {"resume_from_checkpoint": "auto"}
    arithmetic = {"model_name_or_path": None, "dataset_name": None, "reward_funcs": "arithmetic"}
    return [
        job("DDP", **saved), job("DDP, resumed", "DDP", **resumed),
        job("FSDP2", **saved, fsdp=True), job("FSDP2, resumed", "FSDP2", **resumed, fsdp=True),
        job("three held out", eval_dataset_name=folder / "three.jsonl", eval_num_samples=2, max_steps=1),
        job("short", reward_funcs="trainer_ranks:short_on_rank_1"),
        job("raises", reward_funcs="trainer_ranks:raises_on_rank_1", max_steps=1),
        job("signal", reward_funcs="trainer_ranks:signals_rank_1"),
        job("dry run", dry_run=True, **arithmetic),
    ]  # fmt: skip


def test_pitfall_14_an_error_of_one_rank_ends_all_and_other_runs_of_two_processes(model, data, tmp_path):
    folder = tmp_path
    training.make_data(folder / "three.jsonl", rows=3)
    (folder / "jobs.json").write_text(json.dumps(jobs(model, data, folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*command, str(HERE / "trainer_ranks.py"), str(folder)], env=environment, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for name in ("DDP", "FSDP2"):
        check_that_it_resumes_with_the_same_bits(name, folder, seen)
    check_metrics_of_both(folder)
    output = done.stdout + done.stderr
    check_an_error_of_one_ends_both_14(seen, output)
    check_a_reward_that_fails_in_one_14(folder, seen, output)
    check_a_signal_to_one_stops_both(folder, seen)
    check_three_held_out_prompts(folder)
    assert [rank["dry run"] for rank in seen] == [0, 0] and not (folder / "dry run").exists()
    assert output.count("one step   rollout") == 1


def check_that_it_resumes_with_the_same_bits(name, folder, seen):
    assert all(rank[name] == rank[f"{name}, resumed"] == 0 for rank in seen)
    whole, resumed = folder / name, folder / f"{name}, resumed"
    file = Path("model") / "model.safetensors"
    assert (whole / file).read_bytes() == (resumed / file).read_bytes()
    assert [r["loss"] for r in training.steps(whole)] == [r["loss"] for r in training.steps(resumed)]


def check_metrics_of_both(folder):
    assert training.steps(folder / "DDP")[0]["metrics/rank"] == 0.5


def check_an_error_of_one_ends_both_14(seen, output):
    """And not the timeout of the process group, which is longer than this test's."""
    assert [rank["short"] for rank in seen] == [1, 1]
    sentence = "reward 'short_on_rank_1' returned 7 values, expected 8, one for each completion"
    assert f"grpo-kernels train: {sentence}" in output
    assert f"grpo-kernels train: rank 1 failed: RunError: {sentence}" in output


def check_a_reward_that_fails_in_one_14(folder, seen, output):
    """Its completions are unscored, and that is said."""
    assert [rank["raises"] for rank in seen] == [0, 0]
    assert training.steps(folder / "raises")[0]["unscored"] == 8
    assert "8 completions unscored, the first by raises_on_rank_1: KeyError: 'only here'" in output


def check_a_signal_to_one_stops_both(folder, seen):
    assert seen[1]["signal"] == 143 and seen[0]["signal"] == 143
    assert [path.name for path in (folder / "signal").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (folder / "signal" / "model").exists()


def check_three_held_out_prompts(folder):
    records = [json.loads(line) for line in (folder / "three held out" / "log.jsonl").read_text().splitlines()]
    found = [record["evaluation"] for record in records if "evaluation" in record]
    assert [(e["problems"], e["samples"]) for e in found] == [(3, 2), (3, 2)]
