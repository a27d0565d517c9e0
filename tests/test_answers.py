"""Built-in rewards: where a text states its answer, what math-verify reads and compares, the form, the length.

test_pitfall_NN_...: by the number in the list of what goes wrong in GRPO trainers.
"""

from __future__ import annotations

import json
import math
import random
import re
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_rewards import score
from tiny_models import TEMPLATE, WORD_PROBLEMS, tiny_chat
from transformers import AutoTokenizer

from grpo_kernels.trainer.data import load_prompts
from grpo_kernels.trainer.rewards import Rewards, reading
from grpo_kernels.trainer.rewards.answers import exact_answer, last_number, math_answer, reply

NAN = math.nan


@pytest.mark.parametrize(("reward", "golds"), [
    ("gsm8k", ["", "####", "#### x", "3 or 4", "#### 1/0", None, NAN, True, "x-5", "about six", "#### 3\n#### 4", "1 2",
               {"ground_truth": "18"}, ["18"], "\\frac{", "9" * 300, "<answer>1</answer><answer>2</answer>"]),
    ("math", ["", "...", None, math.inf, "\\boxed{1} or \\boxed{2}", "x" * 300, "3 dogs beside 4 cats"]),
])  # fmt: skip
def test_pitfall_13_bad_gold_fails_the_dry_run_and_scores_nothing(reward, golds):
    for gold in golds:
        with pytest.raises(ValueError, match=f"row 1, reward '{reward}': answer ") as caught:
            Rewards([reward]).check({"answer": ["1", gold]})
        assert "\n" not in str(caught.value)
        if reward == "math":
            batch = score([reward], ["#### 1", f"#### {gold}"], answer=["1", gold])
            assert batch.total.isnan().all() and batch.fatal.message.startswith("ValueError: answer ")
    with pytest.raises(ValueError, match=r"answer_column=COLUMN.style or COLUMN.ground_truth names a part of it"):
        Rewards([reward]).check({"answer": [{"style": "rule", "ground_truth": "18"}]})


def test_pitfall_13_a_completion_that_lists_every_number_scores_0():
    numbers = range(100)
    lists = [
        " ".join(map(str, numbers)),
        "#### " + " ".join(map(str, numbers)),
        "\n".join(f"#### {n}" for n in numbers),
        " ".join(f"\\boxed{{{n}}}" for n in numbers),
        "\\boxed{" + ",".join(map(str, numbers)) + "}",
        "The answer is " + " or ".join(map(str, numbers)),
        "\n".join(f"<answer>{n}</answer>" for n in numbers),
    ]
    for gold in ("0", "42", "99", "4"):
        for function in (math_answer, exact_answer):
            assert function(lists, [gold] * len(lists)) == [0.0] * len(lists)


# ---- built-in rewards ------------------------------------------------------------------------------------------------


# text of a completion, gold, right
ANSWERS = [
    # "####" at the start of a line, and no heading of Markdown
    ("6 * 7 = 42\n#### 42", "42", True),
    ("She sold 48+24 = <<48+24=72>>72.\n#### 72", "48/2 = <<48/2=24>>24 clips in May.\n#### 72", True),
    ("#### $1,234.50", "1234.5", True), ("#### 1,234 apples", "1234", True), ("#### **73**", "73", True),
    ("#### \\boxed{18}", "18", True), ("#### 1,000", 1000, True), ("#### 42\n#### 42.0", "42", True),
    ("#### 42\n#### 43", "42", False), ("#### 42\n#### 43", "43", False), ("no #### 42", "42", False),
    ("#### Step 1: count\n9*2=18\nThe answer is \\boxed{18}", "18", True),
    ("#### Step 1\nthe answer is \\boxed{18}", "1", False),
    ("#### 1. Add\n#### **2.** Double\n\\boxed{18}", "18", True),
    ("#### forty-two\nThe answer is 42", "42", True), ("##### 5\n\\boxed{6}", "6", True), ("#### 3 or 4", "4", False),
    ("#### x-7", "7", False), ("#### 1/0", "0", False), ("the answer is 5\n#### 6", "6", True), ("42", "42", False),
    # \boxed{}
    ("So \\boxed{18 \\text{ dollars}}", "18", True), ("\\boxed{\\frac{1}{2}}", "1/2", True), ("\\boxed {7}", "7", True),
    ("$\\boxed{1{,}234}$", "1234", True), ("\\boxed{\n18\n}", "18", True), ("\\boxed{\\$7} is right", "7", True),
    ("\\boxed{1/2}", "0.5", True), ("\\boxed{17\\text{ km}}. No: \\boxed{18}", "18", False),
    ("\\boxed{18", "18", False),
    ("\\boxed{1/2} or \\boxed{0.5}", "0.5", True), ("\\boxed{\\boxed{5}}", "5", True), ("\\boxed{5\\%}", "5", True),
    ("\\boxed{\\{1\\}} and \\boxed{2}", "2", False),
    # signs, exponents, powers, fractions of one character
    ("#### −5", "-5", True), ("#### −5", "5", False), ("#### –5", "-5", True), ("#### － ５", "-5", True),
    ("#### 3e-7", "7", False), ("#### 3e-7", "3", False), ("#### 1.5e3", "1500", True), ("\\boxed{10²}", "102", False),
    ("\\boxed{10²}", "100", True), ("\\boxed{2½}", "2.5", True), ("#### ½", "1/2", True), ("#### -$5", -5, True),
    ("#### €5", "5", True), ("#### 1e-05", 1e-05, True), ("#### 5", 1e-05, False), ("#### 0.1", np.float32(0.1), True),
    # thoughts
    ("<think>the answer is 18", "18", False), ("<think>\\boxed{5}? no</think>\\boxed{18}", "18", True),
    ("\\boxed{5}</think>\\boxed{18}", "18", True), ("<think>a</think>\\boxed{18}<think>", "18", False),
    # <answer>
    ("<answer>18</answer>", "18", True), ("<answer>The answer is \\boxed{18}.</answer> 5", "18", True),
    ("<answer>9 * 2 = 18 dollars</answer>", "18", True), ("<answer>3</answer><answer>4</answer>", "4", False),
    ("<answer>18", "18", False), ("\\boxed{5}<answer>18</answer>", "18", True),
    # "answer is", "Answer:"
    ("Answer: 34", "34", True), ("**Answer:** 34 km.", "34", True), ("ANSWER\n", "34", False),
    ("Answer:\n\n34", "34", True),
    ("**Final answer**: $34$ because", "34", True), ("The answer is: **42**, because 6 is", "6", False),
    ("The answer is 5. No: the answer is 7 apples. 3 are left.", "7", True), ("the answer is 3 or 4", "3", False),
    ("The answer is $\\frac{3}{4}$ cups.", "3/4", True), ("the answer is 12 m^2", "12", True),
    ("the answer is 18%", 18, True),
]  # fmt: skip
SYMBOLS = [
    ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{1}{\\sqrt{2}}", True), ("\\boxed{(x+1)^2}", "x^2+2x+1", True),
    ("\\boxed{x=5}", "5", True), ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", True), ("\\boxed{[1,2)}", "(1,2)", False),
    ("\\boxed{[1,2)}", "[1,2)", True), ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", True), ("\\boxed{B}", "(B)", True),
    ("<answer>x < 5</answer>", "x<5", True), ("\\boxed{5}", "5x", False), ("\\boxed{2}", "2\\pi r", False),
    ("\\boxed{2\\pi r}", "2 \\pi r", True), ("The answer is north", "north", True),
    ("The answer is south", "north", False),
    ("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
    ("\\boxed{\\frac34}", "Then $x = \\frac{6}{8} = \\boxed{\\frac{3}{4}}$.", True),
    ("\\boxed{3\\sqrt{13}}", "3\\sqrt{13}", True),
    ("\\boxed{3, 4}", "3,4", True), ("#### 0.75", "\\frac{3}{4}", True), ("\\boxed{2^{10}}", 1024, True),
]  # fmt: skip


@pytest.mark.parametrize(("reward", "table"), [("gsm8k", ANSWERS), ("math", ANSWERS), ("math", SYMBOLS)])
def test_answers_as_models_write_them(reward, table):
    texts, golds, right = zip(*table, strict=True)
    rewards = Rewards([reward])
    rewards.check({"answer": [*golds]})
    found = score(rewards, [*texts], answer=[*golds]).total.tolist()
    wrong = [(text, gold) for text, gold, yes, one in zip(texts, golds, right, found, strict=True) if one != yes]
    assert not wrong


def test_golds_of_every_form_of_gsm8k_are_read():
    """Its answers end with "#### " and a number, which its own code reads as digits, commas, points and a minus sign;
    those of the word problems, which were written for these tests; and both as they are compared."""
    order = random.Random(0)
    numbers = [order.randrange(10 ** order.randrange(1, 8)) for _ in range(100)]
    solutions = {
        f"6*7=<<6*7=42>>42 in all.\n#### {form}": float(n) for n in numbers for form in (n, f"{n:,}", f"{n}.0")
    }
    solutions |= {f"#### -{n:,}": -float(n) for n in numbers} | {f"#### {n}.25": n + 0.25 for n in numbers}
    rows = map(json.loads, WORD_PROBLEMS.read_text().splitlines())
    solutions |= {row["answer"]: float(row["answer"].rpartition(" ")[2].replace(",", "")) for row in rows}
    assert len(solutions) > 300
    for reward in ("gsm8k", "math"):
        rewards = Rewards([reward])
        rewards.check({"answer": [*solutions]})
        assert score(rewards, [*solutions], answer=[*solutions.values()]).total.tolist() == [1.0] * len(solutions)


@pytest.mark.parametrize("text", [
    "####" * 50_000, "#### " + "9" * 5000, "#### 1" * 50_000, "\\boxed{" * 50_000, "\\boxed{1}" * 50_000,
    "answer is " * 50_000,
    "<answer>" * 50_000, "answer" + " " * 300_000, "answer" + "*" * 300_000,
    "#### **" + "1" * 100_000 + "\n" + "**1." * 50_000,
    "{" * 300_000, "answer is " + "." * 300_000, "\\boxed{1 " + "or 1 " * 39 + "}", "\\boxed{" + "**" * 95 + "}",
    "#### 1 " + "*" * 200,
], ids=range(15))  # fmt: skip
def test_long_texts_are_searched_soon(text):
    start = time.process_time()
    assert math_answer([text] * 2, ["7", "7"]) == last_number([text] * 2, ["7", "7"]) == [0.0, 0.0]
    assert time.process_time() - start < 20, "below 1; minutes where it is quadratic"


BLOW_UPS = [
    "9^{9^{9^9}}", "9**9**9**9", "10^{999999999}", "1e999999999", "99999999!", "\\binom{1000000000}{500000000}",
    "\\prod_{k=1}^{100000000} k", "\\int_0^1 e^{\\sin x^x} dx", "(x+1)^{1000}-(x+2)^{999}", "(" * 90 + "1" + ")" * 90,
    "x_" * 90, "\\frac{" * 20 + "1" + "}{2}" * 20,
]  # fmt: skip


@pytest.mark.parametrize("where", ["main thread", "another thread", "under an alarm"])
def test_pitfall_12_what_sympy_cannot_compute_ends(where, monkeypatch):
    """By math-verify's limit of time in the main thread; elsewhere nothing is read that may take long."""
    texts, found = [f"\\boxed{{{text}}}" for text in BLOW_UPS] + ["\\boxed{\\frac{14}{2}}"], []
    golds = ["7"] * len(texts)
    monkeypatch.setattr(reading, "SECONDS", 1)
    start = time.monotonic()
    if where == "another thread":
        thread = threading.Thread(target=lambda: found.extend(math_answer(texts, golds)))
        thread.start()
        thread.join()
        assert time.monotonic() - start < 20, "about 0.5"
    elif where == "under an alarm":
        signal.setitimer(signal.ITIMER_REAL, 1000)
        try:
            found = math_answer(texts, golds)
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 900, "the alarm of somebody else goes on"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        found = math_answer(texts, golds)
        assert time.monotonic() - start < 120, "about 20: two limits of a second for each"
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert found == [0.0] * len(BLOW_UPS) + [1.0]


def test_a_gold_that_needs_a_limit_of_time_is_refused_in_a_thread():
    caught = []

    def check():
        with pytest.raises(
            ValueError, match=r"row 0, reward 'math': answer 'x\^2' .* in another thread than the main one"
        ) as info:
            Rewards(["math"]).check({"answer": ["x^2"]})
        caught.append(info)

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    assert caught


def test_last_number():
    scores = {
        "56": 1.0, "7 times 8 is 56.": 1.0, "56, or 54": 0.0, "fifty-six": 0.0, "": 0.0, "-56": 0.0, "56.0": 1.0,
        "\\boxed{56}": 1.0, "7*8=**56**": 1.0, "($56)": 1.0, "−56": 0.0, "5.6e1 of them": 1.0, "<think>56": 0.0,
        "56</think>55": 0.0, "5656": 0.0, "56, I mean 1/0": 1.0,
    }  # fmt: skip
    assert last_number([*scores], ["56"] * len(scores)) == [*scores.values()]


def test_exact_answer():
    think, twice = "<think>1</think><answer> 95 </answer>", "<answer>95</answer><answer>1</answer>"
    scores = {"95": 1.0, " 95 \n": 1.0, "95.": 0.0, think: 1.0, twice: 0.0}
    messages = [[{"role": "assistant", "content": text}] for text in scores]
    messages += [[{"role": "assistant", "content": [{"type": "text", "text": "95"}]}]]
    assert exact_answer([*scores, *messages], ["95"] * 11) == [*scores.values(), *scores.values(), 1.0]
    with pytest.raises(ValueError, match="row 0, reward 'exact_answer': answer is empty"):
        Rewards(["exact_answer"]).check({"answer": [" "]})
    for missing in (None, NAN, ["95"], True):
        text = re.escape(f"row 1, reward 'exact_answer': answer is {missing!r}; expected a text or a number")
        with pytest.raises(ValueError, match=text):
            Rewards(["exact_answer"]).check({"answer": [95, missing]})
    with pytest.raises(ValueError, match="reads the column 'answer'; there are: prompt"):
        Rewards(["arithmetic"]).check({"prompt": ["1"]})


THINKS = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
USER = [{"role": "user", "content": "begin with <think>"}]
BEGUN = [*USER, {"role": "assistant", "content": "<think>\n"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_chat(tmp_path_factory.mktemp("chat")))


@pytest.mark.parametrize(("template", "prompt", "begins"), [
    (TEMPLATE, USER, False), (TEMPLATE, BEGUN, True), (TEMPLATE, "2? <think>\n", True), (TEMPLATE, "<think> 2?", False),
    (THINKS, USER, True), (THINKS, BEGUN, True), (THINKS, "2?", False),
])  # fmt: skip
def test_format_counts_the_tag_that_a_prompt_ends_with(template, prompt, begins, tokenizer):
    """By the chat template, in a message of the assistant that is continued, or in a text; and no other one."""
    tokenizer.chat_template = template
    rewards, prompts = Rewards(["format"]), load_prompts([{"prompt": prompt}], tokenizer=tokenizer)
    rewards.check_form(tokenizer, prompts)
    completions = [reply(prompt, f"{tag}1</think> <answer>2</answer>\n") for tag in ("<think>\n", "")]
    given = dict(prompts=[prompt] * 2, completions=completions, completion_ids=[[1]] * 2, columns={}, step=0)
    assert rewards.score(**given).total.tolist() == [1.0 - begins, float(begins)]


def test_a_pattern_takes_the_whole_completion():
    assert score(["pattern=(a+)+."], ["a\n", " ab\n", "aab c"]).total.tolist() == [0.0, 1.0, 0.0]
    assert score(["pattern=1.*2"], ["1\n2", "12", "0 1 2"]).total.tolist() == [1.0, 1.0, 0.0]


def test_soft_overlong_is_dapos_penalty():
    rewards = Rewards(["soft_overlong=4"], [0.5], max_length=10)
    ids = [[1] * length for length in (1, 6, 7, 8, 10, 12)]
    given = dict(prompts=["p"] * 6, completions=["a"] * 6, completion_ids=ids, columns={}, step=0)
    assert rewards.score(**given).total.tolist() == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5] and rewards.names == [
        "soft_overlong"
    ]
    rewards.check({"prompt": ["p"]})


@pytest.mark.parametrize("text", [
    "", "<think>1</think>2<answer>3</answer>", "<answer>3</answer><think>1</think>", "<think>1</think><answer>3",
    "<think><think>1</think><answer>3</answer>", "<think>1</think><answer>3</answer><answer>4</answer>", "0<think>" * 9,
    "<think>" * 50_000, "<think>" + "</think" * 50_000, "<think></think>" + " " * 300_000 + "x",
], ids=range(10))  # fmt: skip
def test_what_has_not_the_form_soon_has_0(text):
    assert score(["format"], [text, f" <think>{'<' * 9}\n</think>\n<answer></answer>\n"]).total.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("template", "right"), [(TEMPLATE, 1.0), (THINKS, 0.0)])
def test_a_thought_that_the_prompt_began_is_no_answer(template, right, tokenizer):
    tokenizer.chat_template = template
    rewards = Rewards(["gsm8k", "last_number", "exact_answer"])
    rewards.check_form(tokenizer, load_prompts([{"prompt": USER}], tokenizer=tokenizer))
    assert rewards.opens == (template == THINKS)
    completions = [reply(USER, text) for text in ("<answer>42</answer>", "3</think><answer>42</answer>")]
    given = dict(prompts=[USER] * 2, completions=completions, completion_ids=[[1]] * 2, step=0)
    batch = rewards.score(**given, columns={"answer": ["42"] * 2})
    found = {name: values.tolist() for name, values in batch.by_name.items()}
    assert found == {name: [right, 1.0] for name in rewards.names}


def test_rewards_need_tags_that_the_tokenizer_writes():
    class Silent:
        def __call__(self, text, **_):
            return {"input_ids": [text]}

        def decode(self, ids, **_):
            return "" if ids == ["</think>"] else ids[0]

    chat = SimpleNamespace(prompt=USER, ids=["2? <think>\n"])
    for name, prompts in (("format", []), ("arithmetic", [chat]), ("gsm8k", [chat])):
        with pytest.raises(ValueError, match=f"'{name}' would be 0 for every completion: .* has </think>, for which"):
            Rewards([name]).check_form(Silent(), prompts)
    Rewards(["arithmetic", "gsm8k", "soft_overlong=3"], max_length=4).check_form(Silent(), [])
