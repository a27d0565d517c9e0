"""The held-out reward, and where a reward says what is correct pass@k and majority@k, from several samples of each
problem."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import fmean, multimode, stdev
from typing import Any, TypeAlias

from tqdm import tqdm

from . import RunError
from .arguments import TrainArguments, add_option
from .checkpoint import CONFIG, RUN
from .data import Prompt, check_source, from_json, is_one_split
from .decoding import choose_decoder
from .files import read_file, write_json
from .mismatch import fix_rotary
from .model import Policy, load_frozen, load_tokenizer
from .ranks import Ranks, Signals
from .rewards import Rewards
from .rewards.answers import reply, said, text_of
from .rewards.reading import final_answer, is_same
from .rewards.scoring import BUILT_IN
from .rollout import Sampler
from .run import load_data, longest_row, make_rewards
from .sampling import eos_ids
from .tasks import ARITHMETIC

EXAMPLES = 3
ACCURACIES = ("pass_at_1", "pass_at_k", "majority_at_k", "greedy")  # known where a reward says what is correct

# sample(prompts, greedy=, seed=): ids and text of a completion for each prompt, a function of these arguments alone.
Sample: TypeAlias = "Callable[..., Sequence[tuple[list[int], str]]]"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimates without bias the probability that one of k completions is correct, from `correct` ones among `samples`
    (Chen et al. 2021, arXiv 2107.03374)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[Hashable], correct: Sequence[bool]) -> float:
    """Says whether the most frequent of the answers to a problem is correct; of several as frequent ones, the share
    that is. None has no vote; of equal answers the first says whether they are correct."""
    winners = [correct[answers.index(answer)] for answer in multimode(a for a in answers if a is not None)]
    return fmean(winners) if winners else 0.0


def votes(texts: Sequence[str]) -> list[int | None]:
    """Returns what each of several completions of a problem, without its thoughts, votes for: the same number where
    their final answers are the same, or without one all of their text. None where that is empty."""
    earlier: list[tuple[str | None, str]] = []
    result: list[int | None] = []
    for text in texts:
        vote = final_answer(text), text.strip()
        same = (i for i, other in enumerate(earlier) if _is_same_vote(other, vote))
        result.append(next(same, len(earlier)) if any(vote) else None)
        earlier.append(vote)
    return result


def _is_same_vote(first: tuple[str | None, str], other: tuple[str | None, str]) -> bool:
    if first[0] is None or other[0] is None:
        return first == other
    return first[0] == other[0] or is_same(first[0], other[0])


def evaluate(
    sample: Sample, prompts: Sequence[Prompt], rewards: Rewards, *, num_samples: int = 4,
    ks: Sequence[int] | None = None, seed: int = 0, step: int = 0, correct_at: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Samples `num_samples` completions of each prompt and a greedy one, and scores them.

    A completion is correct where its total reward is at least `correct_at`, by default 1 where all rewards are 0 or 1;
    an unscored one is not. Other rewards do not say what is correct: the accuracies are left out then. ks: of pass@k,
    default 1, 2, 4, ... up to num_samples. seed: of the samples; the same for each evaluation of a run, so that a
    difference is the policy's. Returns means over the problems, None where nothing was scored, and the first problems
    with their greedy completions as examples; the trainer's README says what each is. Raises RunError where a reward
    function fails for every completion.
    """

    def score(prompts: Sequence[Prompt], greedy: bool) -> tuple[list[float], list[str], list[int]]:
        """Returns total rewards, texts and lengths of one completion of each prompt."""
        drawn = sample([prompt.ids for prompt in prompts], greedy=greedy, seed=seed)
        batch = rewards.score(
            prompts=[prompt.prompt for prompt in prompts],
            completions=[reply(prompt.prompt, text) for prompt, (_, text) in zip(prompts, drawn, strict=True)],
            completion_ids=[ids for ids, _ in drawn],
            columns={name: [prompt.columns.get(name) for prompt in prompts] for name in prompts[0].columns},
            step=step,
        )
        if batch.fatal is not None:
            name, _, message, traceback = batch.fatal
            raise RunError(f"reward {name} failed for every completion of the evaluation: {message}\n{traceback}")
        return batch.total.tolist(), [text for _, text in drawn], [len(ids) for ids, _ in drawn]

    totals, texts, lengths = score([prompt for prompt in prompts for _ in range(num_samples)], greedy=False)
    greedy, greedy_texts, _ = score(prompts, greedy=True)
    groups = [slice(start, start + num_samples) for start in range(0, len(totals), num_samples)]
    scored = [row for group in groups if (row := _scored(totals[group]))]
    means, greedy_scored = list(map(fmean, scored)), _scored(greedy)
    numbers: dict[str, Any] = {
        "reward": fmean(means) if means else None,
        "reward_error": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        "greedy_reward": fmean(greedy_scored) if greedy_scored else None,
        "best_of_n": fmean(map(max, scored)) if scored else None,
    }
    if correct_at is None and scored and {*greedy_scored}.union(*scored) <= {0.0, 1.0}:
        correct_at = 1.0
    if correct_at is not None:
        right = [[total >= correct_at for total in totals[group]] for group in groups]
        told = [
            [said(text, prompt.prompt, rewards.opens) for text in texts[group]]
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        ks = ks or [1 << power for power in range(num_samples.bit_length())]
        numbers |= {
            "pass_at_1": fmean(map(fmean, right)),
            "pass_at_k": {str(k): fmean(pass_at_k(num_samples, sum(row), k) for row in right) for k in ks},
            "majority_at_k": fmean(map(majority_at_k, map(votes, told), right)),
            "greedy": fmean(total >= correct_at for total in greedy),
        }
    return numbers | {
        "mean_length": fmean(lengths),
        "problems": len(prompts),
        "samples": num_samples,
        "unscored": len(totals) - len(_scored(totals)),
        "examples": [
            {"prompt": text_of(prompt.prompt), "completion": text, "reward": None if math.isnan(total) else total}
            for prompt, text, total in zip(prompts[:EXAMPLES], greedy_texts, greedy, strict=False)
        ],
    }


def _scored(totals: Sequence[float]) -> list[float]:
    return [total for total in totals if not math.isnan(total)]


# --- the command ------------------------------------------------------------------------------------------------------

# Options that stand for those of the run.
OPTIONS_OF_RUN = (
    "correct_at", "reward_funcs", "temperature", "max_completion_length", "dataset_test_split", "prompt_column",
    "answer_column", "system_prompt", "chat_template_kwargs",
)  # fmt: skip
# What is read of the options that a run has saved: numbers, and names of data and columns. What is executed is none of
# it: a reward function of the user's, or the code of a model's repository, comes from the command line alone.
READ = (
    "dtype", "use_cpu", "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split",
    "eval_dataset_name", "prompt_column", "answer_column", "system_prompt", "chat_template_kwargs", "reward_funcs",
    "reward_weights", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "correct_at",
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
)  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Runs `grpo-kernels evaluate DIR|MODEL`: prints the table, and with --output writes it as JSON. Returns the exit
    status: 2, after one sentence, for a bad argument."""
    options = parser().parse_args(list(argv))
    try:
        if options.num_samples < 1:
            raise ValueError(f"num_samples={options.num_samples}; expected at least 1")
        if not all(1 <= k <= options.num_samples for k in options.ks or ()):
            raise ValueError(f"ks={options.ks}; expected numbers from 1 to num_samples={options.num_samples}")
        output = options.output
        if output and not (output.is_file() or (not output.exists() and output.absolute().parent.is_dir())):
            raise ValueError(f"output={output}; expected a file, in a folder that exists")
        model, a = resolve(options)
        numbers = {"num_samples": options.num_samples, "ks": options.ks, "seed": options.seed}
        result = evaluate(*load(model, a), **numbers, correct_at=a.correct_at)
        print(table(result))
        if output:
            write_json(output, result)
    except BrokenPipeError:  # see `commands.train`
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"grpo-kernels evaluate: {error}", file=sys.stderr)
        return 2
    return 0


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
    add("--dataset-name", metavar="X", help="a data set to evaluate on (default: the run's)")
    for name in OPTIONS_OF_RUN:
        add_option(result, name, f"{TrainArguments.__dataclass_fields__[name].metadata['help']} (default: the run's)")
    add("--trust-remote-code", action="store_true", help="run the code of the model's repository")
    add("--max-prompts", type=int, help="the first so many problems (default: all)")
    add("--output", type=Path, help="a file for the numbers as JSON")
    return result


def resolve(options: argparse.Namespace) -> tuple[str, TrainArguments]:
    """Returns folder or name of the model, and the options of its run with those of the command. A folder that a run
    wrote, or one of its checkpoints, holds the options of that run; anything else is a model. Nothing above it is read.
    """
    folder = Path(options.target)
    model = folder / "model"
    if (known := options_of_run(folder / CONFIG, options)) and not model.is_dir():
        raise ValueError(f"{folder} holds no final model ({model}); evaluate one of its checkpoints instead")
    if not known:
        known, model = options_of_run(folder / RUN, options), folder
    if not known and not (options.dataset_name and options.reward_funcs):
        what = f"{options.target} is neither the output folder of a run nor its checkpoint"
        raise ValueError(f"{what}; a model needs --dataset-name and --reward-funcs")
    named = {name: getattr(options, name) for name in OPTIONS_OF_RUN} | {"eval_dataset_name": options.dataset_name}
    known |= {field: value for field, value in named.items() if value is not None}
    a = TrainArguments(**known, eval_max_prompts=options.max_prompts, trust_remote_code=options.trust_remote_code)
    a.check_values()
    if options.dataset_test_split is not None and is_one_split(a.held_out_name):
        raise ValueError(f"dataset_test_split={a.dataset_test_split!r}: {a.held_out_name} is one split")
    return str(model) if model.is_dir() else options.target, a


def options_of_run(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns those that a run saved in the file `path` and evaluation reads; none where it is no such file. Raises
    ValueError or TypeError for one of another type, and for code that the command line does not name."""
    is_file = path.is_file() and not path.is_symlink()  # a hub's cache has links to files of models
    saved = from_json(read_file(path), str(path)) if is_file else None
    if not isinstance(saved, dict) or "output_dir" not in saved:  # that of a model has none
        return {}
    known = {name: saved[name] for name in READ if name in saved}
    try:
        TrainArguments(**known).check_values()
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None
    rewards = known.get("reward_funcs", [])
    if options.reward_funcs is None and not BUILT_IN.keys() >= {name.partition("=")[0] for name in rewards}:
        raise ValueError(
            f"{path} names reward functions that are code: {', '.join(map(repr, rewards))}; to run it, expected "
            "--reward-funcs with these names"
        )
    return known


def load(model: str, a: TrainArguments) -> tuple[Sample, list[Prompt], Rewards]:
    """Returns sampler, held-out prompts and rewards."""
    check_source("model_name_or_path", model)
    check_source("dataset_name", a.held_out_name or ARITHMETIC, "dataset")
    tokenizer, lm = load_tokenizer(model, a), load_frozen(model, a)
    ranks = Ranks(use_cpu=a.use_cpu)
    lm.to(ranks.device)
    held_out = load_data(a, tokenizer, lm, held_out=True)
    if not held_out:
        raise ValueError("there are no held-out prompts; expected --dataset-name")
    fix_rotary(lm, longest_row(a, held_out))
    rewards = make_rewards(a, tokenizer, [], held_out)
    if rewards is None:
        raise ValueError("reward_funcs is empty; expected names of built-in rewards, or module:function")
    bar, policy = tqdm(desc="evaluation", disable=None, leave=False, dynamic_ncols=True), Policy(lm)
    choose_decoder(policy, ranks, a)

    def progress(done: int, total: int) -> None:
        bar.set_description(f"evaluation, {done:,}/{total:,}")

    sampler = Sampler(policy, tokenizer, a, eos_ids(lm, tokenizer), ranks, Signals(ranks), progress)
    return sampler.for_evaluation, held_out, rewards


def table(result: dict[str, Any]) -> str:
    """Returns the numbers of `evaluate` for a terminal."""
    n = result["samples"]
    rows = {"reward": result["reward"], "greedy reward": result["greedy_reward"], f"best of {n}": result["best_of_n"]}
    rows |= {f"pass@{k}": value for k, value in result.get("pass_at_k", {}).items()}
    rows |= {f"majority@{n}": result.get("majority_at_k"), "greedy": result.get("greedy")}
    lines = [f"{name:>14}  {value:.4f}" for name, value in rows.items() if value is not None]
    if "pass_at_k" not in result:
        lines.append("no pass@k: rewards other than 0 and 1 do not say what is correct (--correct-at does)")
    unscored = f", {result['unscored']} unscored" if result["unscored"] else ""
    problems, length = result["problems"], result["mean_length"]
    return "\n".join([*lines, f"{problems} problems, {n} samples each{unscored}; {length:.1f} tokens on average"])
