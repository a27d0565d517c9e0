"""The held-out reward, and where a reward says what is correct pass@1, pass@k and majority@k, from several samples of
each problem."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple, Protocol

import torch
from tqdm import tqdm

from . import RunError
from .arguments import TrainArguments
from .data import Prompt, is_one_split
from .model import Policy, load_model, load_tokenizer
from .ranks import Ranks, Signals
from .rewards import Rewards
from .rewards.answers import TAGGED, final_number, reply
from .rollout import Sampler, eos_ids
from .run import load_data, make_rewards


class Sample(Protocol):
    """A completion for each prompt: its ids and its text. A function of its arguments: no other random state is read or
    changed."""

    def __call__(self, prompts: list[list[int]], *, greedy: bool, seed: int) -> Sequence[tuple[list[int], str]]: ...


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that one of k completions is correct, estimated without bias from `correct` ones among `samples`:
    1 - C(samples - correct, k) / C(samples, k) (Chen et al. 2021, arXiv 2107.03374)."""
    if not 0 <= correct <= samples:
        raise ValueError(f"correct={correct}; expected 0 to samples={samples}")
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}; expected 1 to samples={samples}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[Hashable], correct: Sequence[bool]) -> float:
    """Whether the most frequent of the answers to a problem is correct: 0 or 1, or, where several are as frequent, the
    share of them that is. None is no answer and has no vote. Of equal answers, the first says whether they are correct.
    """
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers and {len(correct)} of correct; expected as many")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(bool(correct[answers.index(winner)]) for winner in winners) / len(winners)


def best_of_n(rewards: Sequence[float]) -> float:
    """The highest reward among the completions of a problem; NaN (unscored) counts as -inf, and all NaN gives NaN."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    return max(scored, default=math.nan)


def final_answer(text: str) -> Hashable:
    """What a completion votes with: the contents of its only <answer> block, else its final number (`final_number` of
    the rewards), else all of it; None where it is empty."""
    if len(tagged := TAGGED.findall(text)) == 1:
        return str(tagged[0]).strip()
    number = final_number(text)
    return number if number is not None else text.strip() or None


def evaluate(
    sample: Sample,
    prompts: Sequence[Prompt],
    rewards: Rewards,
    *,
    num_samples: int = 4,
    ks: Sequence[int] | None = None,
    seed: int = 0,
    step: int = 0,
    correct_at: float | None = None,
    answer_of: Callable[[str], Hashable] = final_answer,
) -> dict[str, Any]:
    """Sample `num_samples` completions of each prompt and a greedy one, and score them.

    A completion is correct where its total reward is at least `correct_at`, by default 1 where all rewards are 0 or 1;
    an unscored one is not. Other rewards do not say what is correct: the accuracies are left out then. ks: of pass@k,
    default 1, 2, 4, ... up to num_samples. seed: of the samples; the same for each evaluation of a run, so that a
    difference is the policy's. answer_of: what completions vote with in majority@k.

    Returns means over the problems: reward (total, of the samples), its standard error reward_error, greedy_reward and
    best_of_n (the highest reward of a problem; N = num_samples), None where nothing was scored; the accuracies
    pass_at_1, pass_at_k {"1": ...}, majority_at_k (k = num_samples) and greedy; mean_length of the samples in tokens;
    the numbers of problems, samples (per problem) and unscored samples. Raises ValueError for a bad argument before any
    work, RunError where a reward function fails for every completion.
    """
    ks = check_counts(num_samples, ks)
    if not prompts:
        raise ValueError("prompts is empty; expected at least one held-out prompt")
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    totals, texts, lengths = _score(sample, repeated, rewards, greedy=False, seed=seed, step=step)
    greedy, _, _ = _score(sample, prompts, rewards, greedy=True, seed=seed, step=step)
    groups = [slice(start, start + num_samples) for start in range(0, len(repeated), num_samples)]
    scored = [row for row in ([x for x in totals[group] if not math.isnan(x)] for group in groups) if row]
    means = [_mean(row) for row in scored]
    greedy_scored = [total for total in greedy if not math.isnan(total)]
    found: dict[str, Any] = {
        "reward": _mean(means) if means else None,
        "reward_error": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        "greedy_reward": _mean(greedy_scored) if greedy_scored else None,
        "best_of_n": _mean([best_of_n(row) for row in scored]) if scored else None,
    }
    if correct_at is None and scored and {*greedy_scored}.union(*scored) <= {0.0, 1.0}:
        correct_at = 1.0
    if correct_at is not None:
        right = [[total >= correct_at for total in totals[group]] for group in groups]
        answers = [[answer_of(text) for text in texts[group]] for group in groups]
        found |= {
            "pass_at_1": _mean([sum(row) / num_samples for row in right]),
            "pass_at_k": {str(k): _mean([pass_at_k(num_samples, sum(row), k) for row in right]) for k in ks},
            "majority_at_k": _mean([majority_at_k(*pair) for pair in zip(answers, right, strict=True)]),
            "greedy": _mean([float(total >= correct_at) for total in greedy]),
        }
    return found | {
        "mean_length": _mean(lengths),
        "problems": len(prompts),
        "samples": num_samples,
        "unscored": sum(math.isnan(total) for total in totals),
    }


def check_counts(num_samples: int, ks: Sequence[int] | None) -> list[int]:
    """The k of pass@k, by default 1, 2, 4, ... up to num_samples; raises ValueError where they are not possible."""
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples}; expected at least 1")
    if ks is None:
        return [1 << power for power in range(num_samples.bit_length())]
    if not ks or any(not 1 <= k <= num_samples for k in ks):
        raise ValueError(f"ks={list(ks)}; expected numbers from 1 to num_samples={num_samples}")
    return list(ks)


def _score(
    sample: Sample, prompts: Sequence[Prompt], rewards: Rewards, *, greedy: bool, seed: int, step: int
) -> tuple[list[float], list[str], list[int]]:
    """Total rewards, texts and lengths of one completion of each prompt."""
    drawn = sample([prompt.ids for prompt in prompts], greedy=greedy, seed=seed)
    if len(drawn) != len(prompts):
        raise ValueError(f"sample returned {len(drawn)} completions; expected {len(prompts)}, one for each prompt")
    columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in prompts[0].columns}
    batch = rewards.score(
        prompts=[prompt.prompt for prompt in prompts],
        completions=[reply(prompt.prompt, text) for prompt, (_, text) in zip(prompts, drawn, strict=True)],
        completion_ids=[ids for ids, _ in drawn],
        columns=columns,
        step=step,
    )
    if batch.fatal is not None:
        name, message = batch.fatal.name, batch.fatal.message
        raise RunError(
            f"reward {name} failed for every completion of the evaluation: {message}\n{batch.fatal.traceback}"
        )
    return batch.total.tolist(), [text for _, text in drawn], [len(ids) for ids, _ in drawn]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- the command ------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """What `grpo-kernels evaluate` is asked for. model: a folder or name for from_pretrained; config: the config.json
    of the run, {} where there is none; options: the command's own, None where not given."""

    model: str
    config: dict[str, Any]
    options: argparse.Namespace


def run(argv: Sequence[str]) -> int:
    """`grpo-kernels evaluate DIR|MODEL`: prints the table, and with --output writes it as JSON. Returns the exit
    status: 2, after one sentence, for a bad argument."""
    options = parser().parse_args(list(argv))
    try:
        check_options(options)
        target = resolve(options)
        correct_at = target.config.get("correct_at") if options.correct_at is None else options.correct_at
        sample, prompts, rewards = load(target)
        result = evaluate(
            sample, prompts, rewards, num_samples=options.num_samples, ks=options.ks, seed=options.seed,
            correct_at=correct_at,
        )  # fmt: skip
    except (ValueError, ImportError, OSError) as error:
        print(f"grpo-kernels evaluate: {error}", file=sys.stderr)
        return 2
    print(table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def load(target: Target) -> tuple[Sample, list[Prompt], Rewards]:
    """Model, held-out prompts and rewards: those of the run, as far as the command has none of its own."""
    known = {name: value for name, value in target.config.items() if name in TrainArguments.__dataclass_fields__}
    columns = ("prompt_column", "answer_column", "system_prompt")
    for name in ("dataset_test_split", "reward_funcs", "max_completion_length", "temperature", *columns):
        if getattr(target.options, name) is not None:
            known[name] = getattr(target.options, name)
    if target.options.dataset_name is not None:
        known["eval_dataset_name"] = target.options.dataset_name
    a = TrainArguments(**known)
    if target.options.dataset_test_split is not None and is_one_split(a.held_out_name):
        raise ValueError(f"dataset_test_split={a.dataset_test_split!r}: {a.held_out_name} is one split")
    a.use_peft = a.gradient_checkpointing = False  # transformers finds an adapter in the folder, and its base
    a.eval_max_prompts = target.options.max_prompts
    tokenizer, lm = load_tokenizer(target.model, a), load_model(target.model, a)
    lm.to("cuda" if torch.cuda.is_available() and not a.use_cpu else "cpu")
    held_out = load_data(a, tokenizer, lm, held_out=True)
    if not held_out:
        raise ValueError("there are no held-out prompts; expected --dataset-name")
    rewards = make_rewards(a, [], held_out)
    if rewards is None:
        raise ValueError("reward_funcs is empty; expected names of built-in rewards, or module:function")
    ranks = Ranks(use_cpu=a.use_cpu)
    bar = tqdm(desc="evaluation", disable=None, leave=False, dynamic_ncols=True)

    def progress(done: int, total: int) -> None:
        bar.total, bar.n = total, done
        bar.refresh()

    sampler = Sampler(Policy(lm), tokenizer, a, eos_ids(lm, tokenizer), ranks, Signals(ranks), progress)
    return sampler.for_evaluation, held_out, rewards


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="grpo-kernels evaluate",
        description="Held-out reward and accuracy of a run's model, of its checkpoint, or of a model.",
    )
    add = result.add_argument
    add("target", metavar="DIR|MODEL", help="output folder of a run (its final model), or a model's folder or name")
    add("--num-samples", type=int, default=4, help="completions per problem (default: 4)")
    add("--ks", type=int, nargs="+", help="k of pass@k (default: 1, 2, 4, ... up to the samples)")
    add("--seed", type=int, default=0, help="of the samples (default: 0)")
    add(
        "--correct-at",
        type=float,
        help="total reward from which a completion is correct (default: the run's, else 1 "
        "where all rewards are 0 or 1)",
    )
    add("--dataset-name", help="a file, a folder or a name of datasets, as for train (default: that of the run)")
    add("--dataset-test-split", help="split to evaluate on (default: that of the run, else test)")
    add("--prompt-column", help="column with the prompt (default: that of the run)")
    add("--answer-column", help="column that rewards get as 'answer' (default: that of the run)")
    add("--system-prompt", help="text of a system message before each prompt (default: that of the run)")
    add("--reward-funcs", nargs="+", help="built-in names, module:function, path/file.py:function (default: the run's)")
    add("--max-completion-length", type=int, help="tokens (default: that of the run)")
    add("--temperature", type=float, help="of the samples (default: that of the run)")
    add("--max-prompts", type=int, help="the first so many problems (default: all)")
    add("--output", type=Path, help="a file for the numbers as JSON")
    return result


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers out of range, and for a file that cannot be written."""
    check_counts(options.num_samples, options.ks)
    least_of = {"max_completion_length": 1, "max_prompts": 1, "temperature": 0, "correct_at": -math.inf}
    for name, least in least_of.items():
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name}={value}; expected {'a number' if least < 0 else f'at least {least}'}")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise ValueError(f"output={options.output}: there is no folder {options.output.parent}")
    if options.output is not None and options.output.is_dir():
        raise ValueError(f"output={options.output} is a folder; expected a file")


def is_run(folder: Path) -> bool:
    """Whether a folder holds the config.json of a run: that of a model has no output_dir."""
    try:
        return "output_dir" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # there is none, or it is damaged
        return False


def resolve(options: argparse.Namespace) -> Target:
    """A folder with config.json and model/ is a run; a folder in one, such as checkpoint-100, takes the run's config;
    anything else is a model. Raises ValueError for a run without its final model, and for a model without options that
    a run's config would give."""
    folder = Path(options.target)
    for run_folder in (folder, folder.parent) if folder.is_dir() else ():
        if not is_run(run_folder):
            continue
        config = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))
        model = folder / "model" if run_folder == folder else folder
        if not model.is_dir():
            raise ValueError(f"{folder} holds no final model ({model}); evaluate one of its checkpoints instead")
        return Target(str(model), config, options)
    if not options.dataset_name or not options.reward_funcs:
        raise ValueError(
            f"{options.target} is not the output folder of a run; a model needs --dataset-name and --reward-funcs"
        )
    return Target(options.target, {}, options)


def table(result: dict[str, Any]) -> str:
    """The numbers of `evaluate` for a terminal."""
    n = result["samples"]
    rows = [("reward", result["reward"]), ("greedy reward", result["greedy_reward"])]
    rows += [(f"best of {n}", result["best_of_n"])]
    if "pass_at_k" in result:
        rows += [(f"pass@{k}", value) for k, value in result["pass_at_k"].items()]
        rows += [(f"majority@{n}", result["majority_at_k"]), ("greedy", result["greedy"])]
    lines = [f"{name:>14}  {value:.4f}" for name, value in rows if value is not None]
    if "pass_at_k" not in result:
        lines.append("no pass@k: rewards other than 0 and 1 do not say what is correct (--correct-at does)")
    unscored = f", {result['unscored']} unscored" if result["unscored"] else ""
    lines.append(
        f"{result['problems']} problems, {n} samples each{unscored}; {result['mean_length']:.1f} tokens on average"
    )
    return "\n".join(lines)
