"""report.html: what it holds, its size, broken and hostile input; opened in a headless browser, where one is found."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shutil
import subprocess
import time
import urllib.parse
from types import SimpleNamespace

import pytest
from training_logs import evaluation_record, failing, log, samples, step_record, write_run

from grpo_kernels.trainer import report
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.log import RunLog
from grpo_kernels.trainer.monitor import RULES, Monitor
from grpo_kernels.trainer.report import CHARTS, collect, write_report

HOSTILE = '</script><img src="https://example.com/x" onerror="document.title=\'owned\'"><b>\u2028\ud800'


def page_data(path):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    return json.loads(found.group(1))


# --- content ----------------------------------------------------------------------------------------------------------


def test_a_finished_run(tmp_path):
    records = log(120)
    for record in records:
        record |= {"metrics/mine": 1.5, "other": 1.0} if "loss" in record else {}
    data = page_data(write_report(write_run(tmp_path / "run-7", records, samples(120))))
    assert (data["title"], data["state"], data["episodes"], data["notes"]) == ("run-7", "finished", [], [])
    assert data["sentence"] == "Finished after 120 steps." and data["facts"] == ["dapo"]
    tile = data["tiles"][0]
    assert (tile["label"], tile["before"]) == ("Held-out pass@1", "0.350") and float(tile["value"]) > 0.9
    assert {check["state"] for check in data["checks"]} == {"ok"} and len(data["checks"]) == len(RULES)
    titles = [chart["title"] for chart in data["charts"]]
    assert titles == [*(chart.title for chart in CHARTS), "Reward arithmetic", "mine"]
    assert data["series"]["kl"]["y"] == pytest.approx([r["kl"] for r in records if "kl" in r], rel=1e-4)
    assert data["series"]["eval/pass_at_n"]["x"] == [0, 50, 100] and "other" not in data["series"]
    # What charts read is in a log, and what they shade is an alarm.
    known = data["series"].keys() | {"cispo_clip_ratio"}
    assert {key for chart in CHARTS for key in chart.lines} <= known
    assert {kind for chart in CHARTS for kind in chart.kinds} == RULES.keys()


@pytest.mark.parametrize("kind", ["reward_hacking", "kl_explosion"])
def test_each_failure_is_said_with_its_threshold_and_what_to_do(kind, tmp_path):
    records = failing(kind)
    data = collect(write_run(tmp_path, records, []))
    shown, found = data["episodes"], Monitor(records).alarms
    assert [(e["kind"], e["first"], e["last"]) for e in shown] == [(e.kind, e.first, e.last) for e in found]
    assert f"{shown[0]['seen']} {shown[0]['advice']}" == found[0].message
    state = {check["title"]: check["state"] for check in data["checks"]}[RULES[kind].title]
    assert state == ("past" if shown[-1]["last"] is not None else shown[-1]["severity"])
    # A run that resumes goes on with the alarms of its log.
    resumed = RunLog(tmp_path, SimpleNamespace(is_main_process=True), TrainArguments())
    resumed.start(200, {"log.jsonl": (tmp_path / "log.jsonl").stat().st_size})
    assert resumed.monitor.alarms == found


# --- runs that go on, broken and empty ones ---------------------------------------------------------------------------


def test_a_run_that_goes_on_and_is_damaged(tmp_path, monkeypatch):
    """With a broken last line, and a step that is there twice."""
    folder = write_run(tmp_path, log(10, every=100), samples(10), max_steps=100, finished=False)
    os.utime(folder / "log.jsonl", (1e9, 1e9))
    monkeypatch.setattr(report, "time", SimpleNamespace(time=lambda: 1e9 + 3600, strftime=time.strftime))
    data = collect(folder)
    assert data["state"] == "unfinished"
    assert data["sentence"] == "Step 10 of 100; the log was last written 1:00:00 before this report."
    before = data["series"]["reward"]["y"]
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 10, "reward": 7.0}\n[1]\n{"no": "step"}\n{"step": 11, "lo')
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "completion": "\xff\xfe')
    (folder / "config.json").write_text("{")
    data = collect(folder)
    assert data["last"] == 10 and data["series"]["reward"] == {"x": list(range(1, 11)), "y": [*before[:-1], 7.0]}
    assert data["notes"] == [
        "log.jsonl: 3 of 15 lines cannot be read and are left out; the first is line 13.",
        "config.json could not be read.",
        "samples.jsonl: 1 of 41 lines cannot be read and are left out; the first is line 41.",
    ]


NUMBERS = ["-" + "1" * 300, "1e300", "1.6e308", "-1.7976931e308", "5e-324", "NaN", "-Infinity", "null"]
OTHERS = ["[1, 2]", '{"a": [[]]}', '"text"', "true", "1" * 5000, "[" * 5000 + "]" * 5000]


@pytest.mark.parametrize("value", NUMBERS + OTHERS, ids=lambda value: value[:12])
def test_odd_values_in_every_place_of_every_file_are_survived(value, tmp_path):
    """The report is written, and a value of a wrong type is said with its line."""

    def record(*keys):
        return "{" + ", ".join(['"step": 41', *(f'"{key}": {value}' for key in keys)]) + "}"

    metrics = [*step_record(1, 9, random.Random(0)).keys() - {"step", "slowest_reward"}, "cispo_clip_ratio"]
    held_out = record(*evaluation_record(1, 0.5)["evaluation"].keys() - {"pass_at_k"})
    lines = [record(*metrics), f'{{"step": 41, "evaluation": {held_out}}}', value, f'{{"step": {value}, "loss": 1}}']
    lines += [f'{{"step": 41, "evaluation": {part}}}' for part in (record("pass_at_k"), record("examples"), value)]
    folder = write_run(tmp_path / "run", log(40), samples(40))
    whole = (folder / "log.jsonl").read_text()
    for i, line in enumerate([*lines, record("slowest_reward")]):
        (folder / "log.jsonl").write_text(whole + f"{line}\n" * 12)
        (sentence,) = page_data(write_report(folder))["notes"] or [""]
        assert sentence in ("", "log.jsonl: 12 of 53 lines cannot be read and are left out; the first is line 42.")
        assert i > 1 or bool(sentence) == (value in OTHERS)  # metrics
    row = f'{{"step": 41, "completion": {value}, "prompt": [{{"role": {value}}}], "extra": {value}}}'
    rows = [
        row,
        record("reward", "advantage", "tokens"),
        record("rewards"),
        f'{{"step": 40, "rewards": {{"a": {value}}}}}',
    ]
    (folder / "samples.jsonl").write_text("\n".join(rows))
    for text in (record("seconds", "max_steps", "model_name_or_path", "loss_type"), value):
        for name in ("config.json", "summary.json"):
            (folder / name).write_text(text)
        write_report(folder)


def test_what_log_extra_cannot_write_is_left_out(tmp_path):
    cycle = []
    cycle.append(cycle)
    found = RunLog(tmp_path, SimpleNamespace(is_main_process=True), TrainArguments())
    for value in (cycle, 10**5000, {(1, 2): 3}):
        found.sample({"step": 1, "reward": float("nan"), "extra": {"mine": value, "other": 1}})
    found.sample({"step": 1, "extra": {"mine": {1}}})
    notes = []
    rows = report.read_lines(tmp_path / "samples.jsonl", notes)
    assert [row["extra"] for row in rows] == ["cannot be written as JSON: mine, other"] * 3 + [{"mine": "{1}"}]
    assert notes == [] and rows[0]["reward"] is None


def test_numbers_whose_sum_no_float_holds(tmp_path):
    records = log(30)
    for record in records:
        record.update({"reward": 1.6e308, "tokens_per_second": 1.7976931e308} if "loss" in record else {})
    data = page_data(write_report(write_run(tmp_path, records, [])))
    assert data["tiles"][1]["value"] == "1.6e+308" and data["series"]["reward"]["y"] == [1.6e308] * 30


def test_a_run_without_a_step(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    data = page_data(write_report(tmp_path))
    assert (data["state"], data["sentence"], data["series"]) == ("empty", "No step is logged yet.", {})
    assert data["notes"] == ["There is no log.jsonl.", "There is no samples.jsonl."]
    assert data["tiles"][0] == {"label": "Held-out reward", "value": "–", "before": ""}
    assert sorted(os.listdir(tmp_path)) == ["config.json", "report.html"]


def test_values_that_are_not_finite_and_gaps(tmp_path):
    records = log(120, every=2000)
    records[78] |= {"entropy": float("nan"), "grad_norm": float("inf"), "kl": None}
    step = records[78]["step"]
    data = page_data(write_report(write_run(tmp_path, records, samples(120))))
    assert data["series"]["entropy"]["y"][step - 1] is None and data["series"]["grad_norm"]["y"][step - 1] is None
    assert len(data["series"]["kl"]["y"]) == 119 and step not in data["series"]["kl"]["x"]


def test_under_two_megabytes_for_a_thousand_steps(tmp_path):
    """With long completions in an alphabet of three bytes a letter."""
    rows = [{**row, "completion": "語" * 3000} for row in samples(1000, per_step=2)]
    path = write_report(write_run(tmp_path, log(1000), rows))
    steps = [entry["step"] for entry in page_data(path)["samples"]]
    assert path.stat().st_size < 2e6 and len(steps) == report.SAMPLE_STEPS and (steps[0], steps[-1]) == (1, 1000)


# --- one file, no network ---------------------------------------------------------------------------------------------


def hostile_run(folder):
    rows = samples(20)
    for row in rows:
        row["prompt"] = row["completion"] = HOSTILE
        row["rewards"] = {HOSTILE: 1.0, "other": None}
    records = log(20)
    records[3][f"rewards/{HOSTILE}/mean"] = 1.0
    records[3]["loss"] = float("nan")
    return write_run(folder, records, rows)


def test_no_address_and_no_markup_of_the_run(tmp_path):
    text = write_report(hostile_run(tmp_path)).read_text("utf-8")
    outside = re.sub(r'(<script type="application/json" id="data">).*?(</script>)', r"\1\2", text, flags=re.DOTALL)
    assert re.findall(r"https?://[^\"' ]+", outside) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert "default-src 'none'" in outside and "innerHTML" not in outside
    assert text.count("</script>") == outside.count("</script>") == 2 and "<img" not in text


# --- in a browser -----------------------------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("GRPO_KERNELS_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
NOTE_ERRORS = """<script>
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push(event.blockedURI));
</script>"""
TEXT, COLOR = "document.body.innerText", "getComputedStyle(document.body).backgroundColor"
DRAWN = """[...document.querySelectorAll('#charts svg')].map(svg => [svg.getAttribute('aria-label'),
    Math.max(...[...svg.querySelectorAll('path')].map(path => path.getTotalLength()))])"""
NORMS = """[...document.querySelectorAll('#charts svg')[4].querySelectorAll('text[text-anchor=end]')].map(
    text => text.textContent)"""
STEP = """[document.querySelector('select').selectedOptions[0],
    document.querySelectorAll('#charts figure')[2].querySelector('.legend b')].map(node => node.textContent)"""
SELECT = "(s => (s.selectedIndex = 0, s.dispatchEvent(new Event('change'))))(document.querySelector('select'))"
POINT = """(svg => svg.dispatchEvent(new PointerEvent('pointerdown', {
    clientX: svg.getBoundingClientRect().right - 1 })))(document.querySelector('svg'))"""
UNUSUAL = (TEXT, COLOR, "document.title", "document.querySelectorAll('img').length",
           "document.documentElement.scrollWidth <= innerWidth")  # fmt: skip
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium in PATH and GRPO_KERNELS_BROWSER is not set")


def in_browser(path, *scripts, width=1280, dark=False):
    """What expressions of JavaScript are, one after the other, in the drawn page, which must not have had an error."""
    ask = f"[errors, {', '.join(scripts)}].map(value => value === undefined ? null : value)"
    answer = f"document.body.innerHTML = `<pre>${{btoa(encodeURIComponent(JSON.stringify({ask})))}}</pre>`"
    page = path.with_name("page.html")
    page.write_text(path.read_text("utf-8").replace("<head>", f"<head>{NOTE_ERRORS}") + f"<script>{answer}</script>")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={path.parent}/profile"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    answer = base64.b64decode(re.search("<pre>(.*)</pre>", done.stdout)[1]).decode()
    found, *values = json.loads(urllib.parse.unquote(answer))
    assert found == []
    return values


@needs_browser
def test_a_browser_draws_it_and_follows_the_step(tmp_path):
    """Without errors or requests. The step is chosen by list and plot."""
    path = write_report(write_run(tmp_path, failing("kl_explosion"), samples(200, per_step=2), finished=False))
    text, color, drawn, norms, first, _, selected, _, pointed = in_browser(
        path, TEXT, COLOR, DRAWN, NORMS, STEP, SELECT, STEP, POINT, STEP
    )
    assert color == "rgb(246, 247, 249)"
    assert "KL explosion" in text and "10 per sequence" in text and "Lower the learning rate" in text
    assert [label.split(",")[0] for label, _ in drawn] == [*(c.title for c in CHARTS), "Reward arithmetic"]
    assert all(length > 100 for _, length in drawn)
    assert "reference: from 0.01" in drawn[2][0] and "highest 81" in drawn[2][0]  # for those who do not see the plot
    assert norms[:3] == ["0.316", "1", "3.16"]  # on a logarithmic scale
    assert first == pointed and first[0] == "Step 200" and selected[0] == "Step 1" and selected[1] != first[1]


@needs_browser
@pytest.mark.parametrize("case", ["empty", "hostile"])
def test_unusual_runs_in_a_browser(case, tmp_path):
    """Dark and narrow: nothing runs over the side."""
    folder = tmp_path / "run"
    write_run(folder, [], [], finished=False) if case == "empty" else hostile_run(folder)
    text, color, title, images, fits = in_browser(write_report(folder), *UNUSUAL, width=390, dark=True)
    assert (color, title, images, fits) == ("rgb(15, 18, 24)", "run: training report", 0, True)
    assert ('</script><img src="https://example.com/x"' in text) == (case == "hostile")
    assert ("Nothing to judge yet" in text) == (case == "empty")
