"""Prompts of the trainer: files, data sets, the chat template, bad input, and the order of a run."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import training
from huggingface_hub import errors
from tokenizers import processors

from grpo_kernels.trainer.arithmetic import tokenizer as arithmetic_tokenizer
from grpo_kernels.trainer.data import Prompt, check_source, fingerprint, load_prompts, take
from grpo_kernels.trainer.rewards import Rewards

TEMPLATE = "{% for m in messages %}{{ m['content'] }}+{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def words():
    """One id per character: "0" is 1, "+" is 11, "=" is 12."""
    return arithmetic_tokenizer(32)


@pytest.fixture
def with_bos():
    """A tokenizer that puts "<bos>" first, and a chat template that writes it as well, as those of Llama 3 do."""
    made = arithmetic_tokenizer(32)
    made.add_special_tokens({"bos_token": "<bos>"})
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", made.bos_token_id)]
    )
    made.chat_template = "{{ bos_token }}" + TEMPLATE
    return made


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


# ---- sources --------------------------------------------------------------------------------------------------------


def test_lines_of_objects(tmp_path, words):
    """With a byte order mark, empty lines, and separators inside of a text that end no line of JSON."""
    rows = [{"prompt": "1+2=", "answer": "3", "level": 1}, {"prompt": "1\u2028\x852", "answer": "21"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines + "\n\n", encoding="utf-8-sig")
    first, second = load_prompts(str(tmp_path / "a.jsonl"), tokenizer=words)
    assert first == Prompt("1+2=", [2, 11, 3, 12], {"answer": "3", "level": 1})
    assert (second.prompt, second.columns) == ("1\u2028\x852", {"answer": "21", "level": None})


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".json", "lines.json", ".csv", ".parquet", "folder", "saved", "rows", "Dataset"]
)
def test_every_kind_of_source_gives_the_same_prompts(suffix, tmp_path, words):
    """A JSON file may be a list or have an object per line; a folder holds files, or what save_to_disk wrote."""
    rows = [{"question": "1+2=", "gold": "3"}, {"question": "2+\n2=", "gold": "4, or 5"}]
    made, path = datasets.Dataset.from_list(rows), tmp_path / f"a{suffix}"
    source = {"rows": rows, "Dataset": made}.get(suffix, str(path))
    if suffix in (".jsonl", "lines.json"):
        write(path, *rows)
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif suffix == "folder":
        path.mkdir()
        write(path / "train.jsonl", *rows)
    elif suffix == "saved":
        datasets.DatasetDict({"train": made}).save_to_disk(path)
        made.save_to_disk(path / "alone")
        assert len(load_prompts(str(path / "alone"), tokenizer=words, prompt_column="question")) == 2
    elif suffix in (".csv", ".parquet"):
        getattr(made, f"to_{suffix[1:]}")(path)
    found = load_prompts(source, tokenizer=words, prompt_column="question", answer_column="gold")
    assert [(p.prompt, p.columns) for p in found] == [("1+2=", {"answer": "3"}), ("2+\n2=", {"answer": "4, or 5"})]


def test_an_answer_may_be_a_part_of_a_column(words):
    """As in verl's files."""
    rows = [{"prompt": "1", "reward_model": {"style": "rule", "ground_truth": str(n)}} for n in range(2)]
    found = load_prompts(rows, tokenizer=words, answer_column="reward_model.ground_truth")
    assert [p.columns for p in found] == [
        {"reward_model": row["reward_model"], "answer": str(n)} for n, row in enumerate(rows)
    ]
    dotted = load_prompts([{"prompt": "1", "a.b": "2", "a": {"b": "3"}}], tokenizer=words, answer_column="a.b")
    assert dotted[0].columns == {"answer": "2", "a": {"b": "3"}}


def test_a_system_prompt_is_the_first_message(with_bos):
    rows = [{"prompt": "2"}, {"prompt": [{"role": "user", "content": "2"}]}]
    found = load_prompts(rows, tokenizer=with_bos, system_prompt="1")
    assert [p.prompt for p in found] == [CHAT, CHAT] and found[0].ids == found[1].ids
    with pytest.raises(ValueError, match="row 0: the prompt begins with a message of the system; expected no system_p"):
        load_prompts([{"prompt": CHAT}], tokenizer=with_bos, system_prompt="1")


@pytest.fixture
def asked(monkeypatch):
    """What a hub is asked for; it raises the errors that are put there."""
    names, errors = [], []

    def repo_info(self, name, *, repo_type, timeout):
        names.append((name, repo_type))
        raise errors.pop()

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", repo_info)
    return names, errors


@pytest.mark.parametrize("name", ["t.csv", "./modle", "~/t", "t/", "a/b/c", "folder/t", Path("folder/t")])
def test_a_slip_in_a_path_asks_no_hub(name, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"^model={name}: there is no such file or folder in {tmp_path}$"):
        check_source("model", name)
    for there in ("folder", Path("folder"), "./folder/model", "times-table"):
        check_source("model", there)
    assert asked == ([], [])


RESPONSE = SimpleNamespace(headers={}, status_code=404, request=None, url="")


@pytest.mark.parametrize(("error", "words"), [
    (ConnectionError("no route"), "https://huggingface.co is not reached: no route"),
    (errors.RepositoryNotFoundError("no answer", response=RESPONSE), "no such {kind} at https://huggingface.co"),
    (errors.GatedRepoError("ask for access", response=RESPONSE), None),
    (errors.HfHubHTTPError("too many requests", response=RESPONSE), None),
    (errors.OfflineModeIsEnabled(), None),
    (errors.HFValidationError("a b"), None),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_name_that_no_hub_has_is_refused_at_once(error, words, kind, asked, tmp_path, monkeypatch):
    """Where no hub is reached, transformers and datasets ask for half a minute. Other errors are theirs to say."""
    asked[1].append(error)
    if words is None:
        check_source("name", "user/no-such", kind)
    else:
        with pytest.raises(ValueError, match=f"^name=user/no-such: there is no such .*, and {words.format(kind=kind)}"):
            check_source("name", "user/no-such", kind)
    assert asked == ([("user/no-such", kind)], [])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / f"{kind}s--user--no-such").mkdir()  # it was read before
    check_source("name", "user/no-such", kind)


def test_a_folder_is_read_by_datasets(tmp_path, words):
    write(tmp_path / "train.jsonl", {"prompt": "1+2=", "answer": "3"})
    write(tmp_path / "test.jsonl", {"prompt": "2+2=", "answer": "4"}, {"prompt": "2+3=", "answer": "5"})
    found = load_prompts(str(tmp_path), tokenizer=words, split="test")
    assert [(p.prompt, p.columns) for p in found] == [("2+2=", {"answer": "4"}), ("2+3=", {"answer": "5"})]
    with pytest.raises(ValueError, match=r"cannot load data set .*, split 'dev': .*dev") as raised:
        load_prompts(str(tmp_path), tokenizer=words, split="dev")
    assert "\n" not in str(raised.value)


# ---- tokens ---------------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]


def test_messages_get_the_chat_template_with_one_bos(with_bos):
    (found,) = load_prompts([{"prompt": CHAT, "answer": "3"}], tokenizer=with_bos)
    assert found == Prompt(CHAT, [with_bos.bos_token_id, 2, 11, 3, 11, 12], {"answer": "3"})


def test_a_last_message_of_the_assistant_is_continued(with_bos):
    with_bos.chat_template = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}+{% endif %}{% endfor %}="
    rows = [{"prompt": [CHAT[1], {"role": "assistant", "content": "7"}]}]
    assert load_prompts(rows, tokenizer=with_bos)[0].ids == [3, 11, 8]  # neither the end of the turn nor a new one


# As Qwen3's: the last message of the assistant gets an empty thought.
THINKS = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' and loop.last %}<00>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].name }}{% endif %}+{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<00>{% endif %}"
)


class Letters:
    """A tokenizer whose ids are characters, around one that renders templates."""

    def __init__(self, template):
        self.made = arithmetic_tokenizer(32)
        self.made.chat_template = template

    def __getattr__(self, name):
        return getattr(self.made, name)

    def __call__(self, text, **options):
        return {"input_ids": [*text]}


def rendered(messages, template=THINKS, **options):
    (prompt,) = load_prompts([{"prompt": messages}], tokenizer=Letters(template), **options)
    return "".join(prompt.ids)


@pytest.mark.parametrize("content", ["<0", "<0\n", "7 "])
def test_a_last_message_of_the_assistant_goes_on_to_the_letter_from_the_start_of_a_reply(content, capsys):
    messages = [CHAT[1], {"role": "assistant", "content": content}]
    assert rendered(messages) == f"u2+a{content}"
    assert capsys.readouterr().err == (
        "the data: 1 of 1 prompts (the first in row 0) end in a message of the assistant, which goes on from the start "
        "of a reply: what the chat template would put before it, '<00>', is left out\n"
    )
    assert rendered(messages, chat_template_kwargs={"enable_thinking": False}) == f"u2+a<00>{content}"
    trims = "{% for m in messages %}{{ m.role[0] }}{{ m.content | trim }}+{% endfor %}"
    trims += "{% if add_generation_prompt %}a={% endif %}"  # which a message of the assistant lacks
    assert rendered(messages, template=trims) == f"u2+a{content}"
    assert rendered(messages, template=trims.partition("{% if add")[0]) == f"u2+a{content}"  # no start of a reply
    assert capsys.readouterr().err == ""


def test_a_template_that_changes_the_last_message_is_refused():
    messages = [CHAT[1], {"role": "assistant", "content": "a b"}]
    with pytest.raises(ValueError, match=r"row 0: the chat template (ends with|refuses)"):
        rendered(messages, template="{% for m in messages %}{{ m.content | upper }}{% endfor %}")


def test_content_may_be_parts_of_text_and_calls_of_tools():
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    tool = {"role": "tool", "content": "5", "tool_calls": None, "name": None}
    rows = [{"prompt": [{"role": "user", "content": parts}, call, tool]}]
    (found,) = load_prompts(rows, tokenizer=Letters(THINKS))
    assert "".join(found.ids) == "u23+aadd+t5+a"
    assert found.prompt == [
        {"role": "user", "content": "23"},
        {**call, "content": ""},
        {"role": "tool", "content": "5"},
    ]
    with pytest.raises(ValueError, match="row 0: the chat template leaves out the tool_calls of the messages"):
        load_prompts(rows, tokenizer=Letters(THINKS.replace("m.tool_calls[0].name", "''")))


def test_variables_of_the_chat_template():
    assert rendered(CHAT[1:], chat_template_kwargs={"enable_thinking": True}) == "u2+a"
    assert rendered(CHAT[1:], chat_template_kwargs={"enable_thinking": False}) == "u2+a<00>"
    assert rendered("2", system_prompt="1", chat_template_kwargs={"enable_thinking": False}) == "s1+u2+a<00>"
    for variables, prompt, words in (
        ({"enable_thinkin": False}, CHAT, "the chat template does not read enable_thinkin$"),
        ({"add_generation_prompt": False}, CHAT, "the trainer sets add_generation_prompt itself"),
        ({"truncation": True}, CHAT, "the trainer sets truncation itself"),
        ({"enable_thinking": False}, "2", "has no effect: the prompts of the data are texts"),
    ):
        with pytest.raises(ValueError, match=f"^chat_template_kwargs=.*{words}"):
            rendered(prompt, chat_template_kwargs=variables)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        rendered(CHAT, template=None, chat_template_kwargs={"a": 1})


def test_a_prompt_ends_with_no_end_of_sequence_unsaid(capsys):
    """One that the tokenizer appends, as with add_eos_token, is left out; one of the text or of a template stays."""
    made = arithmetic_tokenizer(32)
    end, id = made.eos_token, made.eos_token_id
    made._tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, id)])
    rows = [{"prompt": "1"}, {"prompt": "2"}, {"prompt": f"3{end}"}]
    assert [p.ids for p in load_prompts(rows, tokenizer=made)] == [[2], [3], [4, id]]
    appended, own = capsys.readouterr().err.splitlines()
    sentence = "the data: {} of 3 prompts (the first in row {}) end with an end of sequence, {!r}, {}"
    why = "which the tokenizer appends to a text: it is left out, as a completion goes on from its prompt"
    assert appended == sentence.format(3, 0, end, why)
    why = "after which no completion goes on: does the chat template heed add_generation_prompt?"
    assert own == sentence.format(1, 2, end, why)
    made.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    assert load_prompts([{"prompt": CHAT}], tokenizer=made)[0].ids == [2, id, 3, id]
    assert "1 of 1 prompts (the first in row 0) end with" in capsys.readouterr().err


def test_repeated_prompts_are_said(words, capsys):
    load_prompts([{"prompt": "1"}, {"prompt": "2"}, {"prompt": "1"}, {"prompt": "1"}], tokenizer=words)
    assert capsys.readouterr().err == "the data: 2 of 4 prompts (the first in row 2) repeat an earlier one\n"


# ---- the fingerprint ------------------------------------------------------------------------------------------------


class Gold:
    """A value of a column whose repr has an address."""

    def __init__(self, answers):
        self.answers = answers


def columns():
    """As a user's program makes them in each process: with values that are shown in another way each time."""
    words = {chr(97 + i) * 3 for i in range(20)}
    return {"set": words, "dict": {word: len(word) for word in words}, "object": Gold(frozenset(words)), "type": Gold,
            "array": np.arange(2000.0), "when": datetime.date(2026, 1, 2),
            "nested": [("x", 1, None, b"y"), {2.5}]}  # fmt: skip


def test_the_same_data_has_the_same_fingerprint_in_every_process():
    program = "from test_trainer_data import *; print(fingerprint([Prompt('1', [2], columns())]))"
    environment = training.ENVIRONMENT | {"PYTHONHASHSEED": "1"}  # another one than here
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == fingerprint([Prompt("1", [2], columns())]) + "\n"


def test_other_data_has_another_fingerprint():
    changed = columns()["array"]
    changed[1000] += 1  # which repr leaves out
    for name, value in (("set", {"x"}), ("object", Gold({"x"})), ("array", changed), ("when", datetime.date.min),
                        ("nested", [["x", 1, None, b"y"], {2.5}]), ("type", Counter), ("dict", {})):  # fmt: skip
        other = fingerprint([Prompt("1", [2], columns() | {name: value})])
        assert other != fingerprint([Prompt("1", [2], columns())]), name
    circle = Gold(None)
    circle.answers = circle
    for value in (iter(open(__file__)), circle):  # noqa: SIM115
        with pytest.raises(
            ValueError, match=r"the data, row 0: the column 'x' holds a .*, which no later run could compar"
        ):
            fingerprint([Prompt("1", [2], {"x": value})])


# ---- bad input ------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "1+1="}


def nested(levels):
    """An object within lists: so many levels."""
    return json.loads("[" * (levels - 1) + '{"a": 1}' + "]" * (levels - 1))


def test_a_column_has_a_hundred_levels_at_most(tmp_path, words):
    """What goes down by recursion (copies for rewards, the hash of prompts) has room for them in mid-run."""
    deep = {"prompt": "1+1=", "levels": nested(100)}
    rows = load_prompts(write(tmp_path / "a.jsonl", deep), tokenizer=words)
    rewards = Rewards([lambda completions, **_: [1.0] * len(completions)])
    columns = {name: [value] for name, value in rows[0].columns.items()}
    found = rewards.score(prompts=["1"], completions=["2"], completion_ids=[[1]], columns=columns, step=0)
    assert found.total.item() == 1.0
    circle = []
    circle += [circle, circle]
    for value in (nested(101), circle):
        text = r"the data, row 1: the column 'levels' is nested more than 100 levels deep$"
        with pytest.raises(ValueError, match=text):
            load_prompts([GOOD, deep | {"levels": value}], tokenizer=words)
    with pytest.raises(ValueError, match=r"data set '.*b.jsonl', row 0: the column 'levels' is nested more than 100"):
        load_prompts(write(tmp_path / "b.jsonl", deep | {"levels": nested(300)}), tokenizer=words)


@pytest.mark.parametrize(("rows", "message"), [
    ([], r"data set '.*a.jsonl' \(split 'train'\) is empty"),
    ([{"question": "1", "answer": "1"}], r"has no column \"prompt\"; found 'question', 'answer'"),
    ([{}], r"has no column \"prompt\"; found no columns"),
    ([GOOD, {"question": "1"}], r"row 1: the prompt is None; expected"),
    ([GOOD, "", "{'prompt': 1}"], r"a.jsonl.*: line 3 is not JSON: Expecting property name"),
    ([GOOD, "[1]"], r"^data set '.*a.jsonl', row 1 is \[1\]; expected an object with the prompt by its name"),
    ([GOOD, {"prompt": 7}], r"row 1: the prompt is 7; expected a text or a list of messages"),
    ([GOOD, {"prompt": []}], r"row 1: the prompt is \[\]; expected"),
    ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
     r"row 0: message 0 of the prompt has the part {'type': 'image'}; expected texts alone"),
    ([{"prompt": [{"role": "user", "content": 7}]}], r"row 0: message 0 of the prompt has the content 7; expected a"),
    ([{"prompt": [{"role": "user"}]}], r"row 0: message 0 of the prompt is .*; expected role and content, or tool_ca"),
    ([{"prompt": ["1"]}], r"row 0: the prompt is \['1'\]; expected a text or a list of messages"),
    ([GOOD, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"], r"a.jsonl.*: line 2 is not JSON: .*recursion"),
    ([GOOD, {"prompt": "1\ud800"}], r"row 1: the tokenizer refuses the prompt '1\\ud800': "),
    ([GOOD, {"prompt": ""}], r"row 1: the prompt '' has no tokens"),
    ([{"prompt": CHAT}], r"row 0: the prompt is a list of messages, and the tokenizer has no chat template"),
], ids=lambda value: str(value)[:80])  # fmt: skip
def test_bad_rows_are_one_sentence(rows, message, tmp_path, words):
    with pytest.raises(ValueError, match=message) as raised:
        load_prompts(write(tmp_path / "a.jsonl", *rows), tokenizer=words)
    assert "\n" not in str(raised.value)


def test_what_a_template_raises_is_shown(with_bos):
    with_bos.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match="row 0: the chat template refuses the messages: System role not supported"):
        load_prompts([{"prompt": CHAT}], tokenizer=with_bos)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("b.jsonl", b"\xff\xfe", "cannot load data set .*b.jsonl.*utf-8"),
    ("c.txt", b"", r"cannot load data set .*c.txt.*; expected 'arithmetic', .* a file \(.jsonl, .json, .csv, .parq"),
    ("d.parquet", b"1", "cannot load data set .*d.parquet"),
    ("e.json", b"[1]", "data set '.*e.json', row 0 is 1; expected an object with the prompt by its name"),
    ("f.json", b"[1", "f.json.*: it is not JSON: "),
    ("g.csv", b"prompt\n1,2", "g.csv.*: a row has more values than the first line has names"),
])  # fmt: skip
def test_bad_files_are_one_sentence(name, content, message, tmp_path, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(tmp_path / name), tokenizer=words)
    with pytest.raises(ValueError, match=r"dataset_config='main' with .*; only data sets of `datasets` have one"):
        load_prompts(str(tmp_path / name), tokenizer=words, config="main")


GOLD = {"answer_column": "gold"}


@pytest.mark.parametrize(("source", "options", "message"), [
    ([{"question": "1"}], {}, "the data has no column \"prompt\"; found 'question': prompt_column names it"),
    ([{"prompt": "1"}], GOLD, "no column \"gold\"; found 'prompt': answer_column"),
    ([{"prompt": "1", "answer": "2", "gold": "3"}], GOLD, "the data has a column 'answer' beside answer_column=gold"),
    ([{"prompt": "1"}], {"answer_column": "a.b"}, "no column \"a\"; found 'prompt': answer_column"),
    ([{"prompt": "1", "a": {"b": 1}}, {"prompt": "1", "a": {}}], {"answer_column": "a.b"},
     "row 1: there is no 'a.b': 'b' is looked up in {}"),
    ([7], {}, "the data, row 0 is 7; expected an object"),
    ("arithmetic", {"config": "main"}, "dataset_config='main' with 'arithmetic'"),
    ("arithmetic", {"split": "dev"}, "split='dev' of the generated task 'arithmetic'; expected 'train' or 'test'"),
])  # fmt: skip
def test_bad_sources_are_one_sentence(source, options, message, words):
    with pytest.raises(ValueError, match=message):
        load_prompts(source, tokenizer=words, **options)


# ---- the order ------------------------------------------------------------------------------------------------------


def test_the_order_visits_each_prompt_once_an_epoch_however_it_is_taken():
    order = take(7, 0, 60, seed=1)
    epochs = [tuple(order[i : i + 7]) for i in range(0, 35, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(epochs)) == 5
    for size in (1, 3, 7, 16):  # within an epoch, over its end, over two ends
        assert [i for start in range(0, 60, size) for i in take(7, start, size, seed=1)][:60] == order
    # Seed s, epoch e is not seed s + 1, epoch e - 1, as where the seed of an epoch is a sum.
    orders = Counter(tuple(take(20, 20 * epoch, 20, seed)) for seed in range(10) for epoch in range(10))
    assert max(orders.values()) == 1
