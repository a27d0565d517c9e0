"""Two processes: errors of one of them, signals, evaluation. All runs share one torchrun, in one test.

Equal steps and resuming: test_trainer_parity.py.
"""

from __future__ import annotations

import json
import subprocess
import sys

import training

STEPS = {"max_steps": 4, "save_steps": 1, "num_iterations": 2, "steps_per_generation": 2, "beta": 0.1,
         "per_device_train_batch_size": 4, "reward_funcs": "trainer_ranks:length"}  # fmt: skip
JOBS = {
    "three held out": {"eval_num_samples": 2, "max_steps": 1},
    "short": {"reward_funcs": "trainer_ranks:short_on_rank_1"},
    "raises": {"reward_funcs": "trainer_ranks:raises_on_rank_1", "max_steps": 1},
    "signal": {"reward_funcs": "trainer_ranks:signals_rank_1"},
    "dry run": {
        "dry_run": True, "model_name_or_path": None, "dataset_name": None, "reward_funcs": "arithmetic",
    },
}  # fmt: skip


def test_pitfall_14_an_error_of_one_rank_ends_all_and_other_runs_of_two_processes(model, data, tmp_path):
    folder, jobs = tmp_path, []
    for name, options in JOBS.items():
        held_out = training.make_data(folder / "three.jsonl", rows=3) if name == "three held out" else None
        argv = training.arguments(model, data, folder / name, **STEPS | options, eval_dataset_name=held_out)
        argv.remove("--use-cpu")  # which a machine without a GPU does not need
        jobs.append({"name": name, "argv": argv})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(training.HERE / "trainer_ranks.py"), str(folder)], env=training.ENVIRONMENT,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    output = done.stdout + done.stderr

    # An error of one ends both, and not the timeout of the process group, which is longer than this test's.
    assert [rank["short"] for rank in seen] == [1, 1]
    sentence = "reward 'short_on_rank_1' returned 7 values, expected 8, one for each completion"
    assert f"grpo-kernels train: {sentence}" in output
    assert f"grpo-kernels train: rank 1 failed: RunError: {sentence}" in output

    # A reward that fails in one: its completions are unscored, and that is said.
    assert [rank["raises"] for rank in seen] == [0, 0]
    assert training.steps(folder / "raises")[0]["unscored"] == 8
    assert "8 completions unscored, the first by raises_on_rank_1: KeyError: 'only here'" in output

    # A signal to one stops both.
    assert [rank["signal"] for rank in seen] == [143, 143] and not (folder / "signal" / "model").exists()
    assert [path.name for path in (folder / "signal").glob("checkpoint-*")] == ["checkpoint-1"]

    # Three held-out prompts for two ranks, and a metric that is the mean over them.
    records = [json.loads(line) for line in (folder / "three held out" / "log.jsonl").read_text().splitlines()]
    found = [record["evaluation"] for record in records if "evaluation" in record]
    assert [(e["problems"], e["samples"]) for e in found] == [(3, 2), (3, 2)]
    assert training.steps(folder / "three held out")[0]["metrics/rank"] == 0.5

    assert [rank["dry run"] for rank in seen] == [0, 0] and not (folder / "dry run").exists()
    assert output.count("one step   rollout") == 1
