"""Numbers in the documents: each is that of a file of results, and each file says of which code it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import report
from chart import chart
from quotes import differences, filled, generations, unquoted

from grpo_kernels.commands.bench import machine

PYTHON = '"""A module."""\n\n\ndef half(x):\n    """Halves it."""\n    return x / 2  # exactly\n'
CXX = 'int half(int x) { return x / 2; } // exactly\nconst char* url = "http://a";\n'


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for folder in machine.MEASURED:
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "csrc/half.h").write_text(CXX)
    (tmp_path / "grpo_kernels/head/half.py").write_text(PYTHON)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("grpo_kernels/head/half.py", "Halves it", "The half", False),
        ("grpo_kernels/head/half.py", "x / 2  # exactly", "(\n        x / 2\n    )", False),
        ("grpo_kernels/head/half.py", "x / 2", "x / 3", True),
        ("csrc/half.h", "{ return x / 2; } // exactly", "{\n  return x/2;  /* half */\n}", False),
        ("csrc/half.h", "http://a", "http://b", True),
        ("csrc/half.h", "return x", "returnx", True),
    ],
)
def test_the_digest_is_of_code_and_not_of_its_text(code, file, old, new, changes):
    before, text = machine.code_digest(code), (code / file).read_text()
    assert old in text
    (code / file).write_text(text.replace(old, new))
    assert (machine.code_digest(code) != before) == changes


def test_results_say_of_which_code_they_are(tmp_path):
    here = machine.code(machine.ROOT)
    assert here["digest"] == machine.code_digest(machine.ROOT) and len(here["digest"]) == 16
    copied = machine.code(tmp_path)  # without sources and git, as it is installed
    assert [copied[name] for name in ("revision", "clean", "digest")] == [None] * 3
    for command in ("init -q", "-c user.name=a -c user.email=b commit -q --allow-empty -m c"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    copied = machine.code(tmp_path)
    assert len(copied["revision"]) == 12 and copied["clean"]
    (tmp_path / "new").touch()
    subprocess.run(["git", "add", "new"], cwd=tmp_path, check=True)
    assert machine.code(tmp_path)["clean"] is False


# --- numbers in pages -------------------------------------------------------------------------------------------------

CASES = [
    {"case": {"head": name, "tokens": 64}, "ours": {"seconds": s, "times": [s, 9 * s, 2 * s]}, "trl": {"seconds": 3.0}}
    for name, s in (("small", 1.0), ("large", 2.0))
]
ENVIRONMENT = {"date": "2026-11-29T10:00:00+00:00", "revision": "abc", "digest": "today"}


def write(folder: Path, name: str, digest: str | None, **document: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": ENVIRONMENT | {"digest": digest}, **document}))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write(tmp_path, "cpu.json", "today", cases=CASES, note="about 5")
    return tmp_path


@pytest.mark.parametrize(
    ("number", "source"),
    [
        ("2.0", "cases > [case.head=large] > ours > seconds : .1f"),
        ("1 to 2", "cases > * > ours > seconds : .0f"),
        ("1.5 to 3.0", "cases > [case.tokens=64; trl] > trl > seconds / cases > * > ours > seconds : .1f"),
        ("0.50", "1 / cases > 1 > ours > seconds : .2f"),
        ("2,000", "cases > 0 > ours > times > median() : ,.0f ms"),
    ],
)
def test_a_number_is_that_of_its_file_and_noticed_when_it_was_changed(number, source, results):
    page = f"One.\n\nIt took {{}}<!-- cpu.json > {source} --> of it.\n"
    assert filled(page.format(number), results) == (page.format(number), [])
    now, problems = filled(page.format("7.7 to\n8.8"), results)
    assert (now, problems) == (page.format(number), [])
    assert differences(page.format("7"), now) == [f"3: 7, which is {number} in cpu.json"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("gpu.json > cases > 0 : .1f", "No such file"),
        ("cpu.json > cases > 2 > ours > seconds : .1f", "there is no 2"),
        ("cpu.json > cases > [case.head=tiny] > ours > seconds : .1f", "nothing at [case.head=tiny]"),
        ("cpu.json > cases > 0 > ours > minutes : .1f", "there is no minutes"),
        ("cpu.json > note : .1f", "no number at note"),
        ("cpu.json > cases > 0 > case > median() : .1f", "not supported"),
        ("cpu.json > cases > 0 > ours > times / cases > * > ours > seconds : .1f", "no number"),
        ("cpu.json > cases > 0 > ours > seconds : .1f furlongs", "furlongs"),
        ("cpu.json > cases > 0 > ours > seconds : .0%", ".0% gives '100%', which cannot be read as a number"),
        ("broken.json > cases : .1f", "Expecting property name"),
    ],
)
def test_a_number_without_file_or_field_is_noticed(source, said, results):
    (results / "broken.json").write_text("{")
    page = f"It took 5<!-- {source} --> s."
    now, problems = filled(page, results)
    assert now == page and len(problems) == 1 and problems[0].startswith("1: 5: ") and said in problems[0]


def test_a_number_in_a_table_that_its_file_does_not_give_is_noticed():
    pages = "Some.\n2.0<!-- cpu.json > cases : .1f -->\n| 5 |\n", "Some.\n| 5 |\n"
    assert differences(*pages) == ["2: its files give '| 5 |'"]


@pytest.mark.parametrize(
    "number", ["0.63", "1.1 to 1.2", "5 %", "3 x", "12 ms", "9 seconds", "4 GiB", "2 times", "1 F"]
)
def test_a_measured_number_without_a_comment_is_noticed(number):
    page = f"# Title\n\nOurs took {number} of TRL's."
    assert list(unquoted(page, ())) == [f"3: {number.split(' ')[0] if 'to' not in number else number} names no file"]
    assert not list(unquoted(page, (number,)))
    assert list(unquoted("It has 5<!-- cpu.json > cases --> entries.", ())) == ["1: 5 names no file"]  # nor a format


def test_settings_versions_and_code_are_no_measurements():
    page = """TRL 1.16 and 0.8.5, torch 2.8 or later, Python 3.11 to 3.14, Qwen2.5-0.5B, 16,384 tokens, 2026-11-26,
8 x 4,096 tokens with top_p 0.9, beta 0.04, 2^-12 and `1.5 GiB`, [a page](x-1.5.md), [arXiv:2512.02556](y)

    0.5 s of code

```
0.5 s of code
```
<!-- results:begin -->
| 0.5 s |
<!-- results:end -->
"""
    assert not list(unquoted(page, ()))


def test_files_of_other_code_are_listed_by_revision(results):
    write(results, "gpu/old.json", "yesterday")
    nested = {"environment": {}, "targets": {"environment": ENVIRONMENT | {"digest": None}}}  # as bench/gpu.py has it
    (results / "gpu/older.json").write_text(json.dumps(nested))
    (results / "bare.json").write_text("{}")
    files = "[gpu/old.json](results/gpu/old.json), [gpu/older.json](results/gpu/older.json)"
    listed, problems = generations(results, "today")
    assert listed == [f"- 29 November 2026, revision abc: {files}"]
    assert problems == ["bare.json does not say of which code it is"]
    assert "cpu.json" in str(generations(results, "tomorrow"))


@pytest.mark.parametrize(("text", "said"), [("{", ": Expecting property"), ("[]", " holds a list; expected an object")])
def test_a_file_that_cannot_be_read_is_one_sentence(text, said, tmp_path, monkeypatch):
    (tmp_path / "cpu.json").write_text(text)
    assert [line.startswith(f"cpu.json{said}") for line in generations(tmp_path, "today")[1]] == [True]
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"^bench/results/absent.json: .*No such file"):
        report.load("absent.json")


def test_the_chart_has_a_gap_in_bars_that_are_too_long_and_says_what_is_missing():
    found = {name: {"seconds": {"median": s}} for name, s in (("slow", 9.0), ("ours", 0.5), ("other", 2.0))}
    found["ours"]["peak_bytes"], found["slow"]["memory_error"] = 3 * 2**30, "out of memory: ..."
    found |= {"few": {"fewer_tokens": 1024}, "large": {"error": "out of memory: ..."}, "broken": {"error": "wrong"}}
    names = {"ours": "ours", "other": "theirs", "slow": "<slow>", "few": "few", "large": "large", "broken": "broken"}
    drawn = ElementTree.fromstring(chart({"A & B": found}, names))
    rows = [element for element in drawn if element.tag.endswith("}g")]
    texts = [[x.text for x in row if x.tag.endswith("text")] for row in rows]
    assert texts == [
        ["ours", "500 ms", "3.0 GiB"],
        ["theirs", "2.0 s", "not measured"],
        ["<slow>", "9.0 s", "out of memory"],
        ["few", "only 1,024 tokens", "not measured"],
        ["large", "out of memory", "not measured"],
    ]
    assert "A & B" in [element.text for element in drawn]
    assert [len([x for x in row if x.tag.endswith("path")]) for row in rows] == [0, 0, 1, 0, 0]
    widths = [int(x.get("width")) for row in rows for x in row if x.tag.endswith("rect")]
    assert widths[0] == pytest.approx(widths[2] / 4, abs=1) and widths[1] == widths[2] == widths[3]


def test_pages_have_the_numbers_of_the_committed_files():
    """But for the list of files of other code, which `make check-figures` compares too."""
    pages = {name: (report.ROOT / name).read_text() for name in ("README.md", "grpo_kernels/README.md")}
    new, problems = report.filled_pages(pages)
    assert (report.FIGURES / "step.svg").read_text() == report.step()
    assert not problems and not [found for name in pages for found in differences(pages[name], new[name])]
    assert len(report.EXCEPTIONS) <= 10
