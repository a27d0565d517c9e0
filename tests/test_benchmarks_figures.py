"""The pictures of results: what they show is what the document says. And the learning curves behind one of them."""

from __future__ import annotations

import itertools
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from grpo_kernels.benchmarks import figures, panels
from grpo_kernels.trainer.arithmetic import start_model

BENCH = Path(__file__).parents[1] / "bench"
ENVIRONMENT = {
    "date": "2026-01-31T12:00:00+00:00",
    "device": "cpu",
    "driver": None,
    "cpu": "Some CPU",
    "threads": 7,
    "cpu_capability": "AVX2",
    "versions": {"grpo-kernels": "0.1.0", "torch": "2.99.1", "trl": None},
}
TITLES = {"ours": "ours", "floor": "bare matrix products", "eager": "eager PyTorch", "trl": "TRL"}
SECONDS = {"ours": 2.1, "floor": 2.0, "eager": 3.0, "trl": 5.0}
OUT_OF_MEMORY = {"error": "out of memory: OutOfMemoryError: tried"}
BLOCKS = ["ours", "eager", "trl"]


def entry(name, scale=1.0, **changes):
    median = SECONDS.get(name, 4.0) * scale
    return {
        "title": TITLES.get(name, name),
        "setting": "",
        "seconds": {"median": median, "min": 0.9 * median, "max": 1.2 * median, "times": []},
        "errors": None if name == "floor" else {"loss": 1e-6, "logps_max": 2e-3, "dhidden": 3e-4, "dweight": 4e-4},
    } | changes


def failed(name, **why):
    return {"title": TITLES.get(name, name), "errors": None} | why


def case(implementations=None, **changes):
    shape = dict(head="qwen2.5-0.5b", tokens=4096, hidden_size=896, vocab_size=151936, dtype="bfloat16", mode="step")
    fields = shape | dict(generations=4, idle_share=0.0, beta=0.04, length=1024) | changes
    return {"case": fields, "implementations": implementations or {name: entry(name) for name in SECONDS}}


def masked(kept_ids, bound, scale=1.0, **changes):
    """A case with sampling masks, and the prediction that bandwidth makes of it."""
    implementations = {
        name: entry(name, scale if name == "ours" else 1.0) for name in ("ours", "ours-unmasked", "floor")
    }
    found = case(implementations, kept_ids=kept_ids, masked_share=1.0, **changes)
    return found | {"predicted": {"ways": {"kept": {"seconds": bound}}}}


def document(*cases, **environment):
    made = {"environment": ENVIRONMENT | environment, "command": "", "cases": list(cases), "not_run": []}
    return json.loads(json.dumps(made))  # as it comes from a file


def sized(peaks, **changes):
    """A case with peaks of memory; None where it ran out."""
    return case(
        {
            name: failed(name, memory_error="out of memory: killed") if peak is None else entry(name, peak_bytes=peak)
            for name, peak in peaks.items()
        },
        **changes,
    )


def artists(figure, marker):
    """label -> [(xs, ys)] of the lines with this marker, over all axes."""
    found = {}
    for axis in figure.axes:
        for line in axis.get_lines():
            if line.get_marker() == marker:
                found.setdefault(line.get_label(), []).append((list(line.get_xdata()), list(line.get_ydata())))
    return found


def texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def everything():
    """A document with data for every picture."""
    backends = {name: entry(name) for name in (*SECONDS, "ours-unscored", "ours-torch")}
    peaks = {"ours": 2**28, "eager": 2**32}
    return document(
        *(case(backends, mode=mode) for mode in ("step", "frozen", "forward")),
        *(sized(peaks, head="long", tokens=16 * n, length=n) for n in (256, 512, 1024)),
        *(case(head="custom", tokens=n) for n in (1024, 2048, 8192)),
        *(case(head="custom", tokens=64, hidden_size=n) for n in (64, 128, 256)),
        *(case(head="custom", tokens=64, vocab_size=n) for n in (1024, 2048, 8192)),
        *(case(head="custom", tokens=128, generations=n) for n in (2, 4, 8)),
        *(case(idle_share=share, beta=0.0) for share in (0.0, 0.5, 1.0)),
        *(masked(n, 1e-3 * n) for n in (8, 32, 128)),
    )


# --- which pictures -------------------------------------------------------------------------------------------


def test_every_picture_is_drawn_from_data(tmp_path, monkeypatch):
    monkeypatch.setattr(panels, "DPI", 30)
    written = figures.draw(everything(), tmp_path / "new", "cpu-")
    assert [path.name for path in written] == [f"cpu-{name}.png" for name in figures.PICTURES]
    assert sorted(written) == sorted((tmp_path / "new").iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_one_batch_has_no_curves(tmp_path):
    assert [path.name for path in figures.draw(document(case()), tmp_path)] == ["time.png", "errors.png"]


@pytest.mark.parametrize(
    "implementations",
    [
        {},
        {"ours": entry("ours", errors=None), "eager": entry("eager", errors=None)},  # without the floor: over what?
        {"floor": failed("floor", **OUT_OF_MEMORY), "eager": failed("eager", **OUT_OF_MEMORY)},
        {"floor": entry("floor"), "ours": entry("ours", errors=None)},
        {"floor": entry("floor"), "ours": failed("ours", missing="not installed")},
        {"floor": entry("floor"), "eager": failed("eager", error="ValueError: no")},
    ],
)
def test_nothing_to_draw_is_no_file(implementations, tmp_path):
    empty = document(case() | {"implementations": implementations})
    assert figures.draw(empty, tmp_path / "none") == []
    assert figures.draw(document(), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


# --- time -----------------------------------------------------------------------------------------------------


def test_time_is_the_median_over_the_floor():
    figure = figures.PICTURES["time"](document(case()))
    dots = artists(figure, "o")
    assert {label: xs for label, [(xs, _)] in dots.items()} == {
        "ours": [pytest.approx(1.05)],
        "eager PyTorch": [pytest.approx(1.5)],
        "TRL": [pytest.approx(2.5)],
    }
    assert [dots[label][0][1] for label in ("ours", "eager PyTorch", "TRL")] == [[1], [2], [3]]  # the fastest on top
    assert texts(figure) == [
        "qwen2.5-0.5b, N 4,096, H 896, V 151,936, bfloat16",
        "ours  1.05",
        "eager PyTorch  1.50",
        "TRL  2.50",
    ]
    spreads = [line.get_xdata() for line in figure.axes[0].get_lines() if line.get_linewidth() == 2.5]
    assert spreads[0] == pytest.approx([0.9 * 1.05, 1.2 * 1.05])


def test_time_has_a_cross_where_memory_ran_out():
    found = {"floor": entry("floor"), "eager": failed("eager", **OUT_OF_MEMORY), "ours": entry("ours")}
    figure = figures.PICTURES["time"](document(case(found)))
    assert list(artists(figure, "x")) == ["eager PyTorch: out of memory"]
    assert texts(figure)[1:] == ["ours  1.05", "eager PyTorch: out of memory"]  # last, however it came


def test_time_takes_one_case_per_head_and_type():
    fewer = {name: entry(name) for name in ("floor", "ours", "eager")}
    figure = figures.PICTURES["time"](
        document(
            case(fewer, tokens=8192),
            case(tokens=2048, dtype="float32"),
            case(tokens=1024),
            case(tokens=4096),
            case(tokens=16384, idle_share=0.5),
            case(tokens=16384, beta=0.0),
            case(tokens=16384, mode="forward"),
        )
    )
    headings = [text for text in texts(figure) if "H 896" in text]
    assert headings == [
        "qwen2.5-0.5b, N 4,096, H 896, V 151,936, bfloat16",
        "qwen2.5-0.5b, N 2,048, H 896, V 151,936, float32",
    ]


def test_backends_are_a_picture_of_their_own():
    made = everything()
    labels = {name: set(artists(figures.PICTURES[name](made), "o")) for name in ("time", "backends")}
    assert labels == {"time": {"ours", "eager PyTorch", "TRL"}, "backends": {"ours", "ours-torch"}}


# --- memory ---------------------------------------------------------------------------------------------------


def test_memory_is_drawn_against_the_length_of_a_fixed_number_of_completions():
    eager = {256: 2**30, 512: 2**31, 1024: None}
    cases = [sized({"ours": 2**28, "eager": eager[n]}, tokens=16 * n, length=n) for n in (1024, 256, 512)]
    figure = figures.memory(document(*cases))
    assert artists(figure, "o") == {
        "ours": [([256, 512, 1024], [2**28] * 3)],
        "eager PyTorch": [([256, 512], [2**30, 2**31])],
    }
    crosses = artists(figure, "x")
    assert [(label, xs) for label, [(xs, _)] in crosses.items()] == [("eager PyTorch: out of memory", [1024])]
    assert sorted(texts(figure)) == ["eager PyTorch: out of memory", "ours"]
    [axis] = figure.axes
    assert axis.get_xlabel() == "tokens per completion, 16 completions"
    assert axis.get_xscale() == axis.get_yscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["256", "512", "1k"]


def test_crosses_stand_above_every_line():
    names, cases = ["eager", "trl", "liger", "verl"], []
    for length in (256, 512, 1024):
        peaks = dict.fromkeys(names, None if length == 1024 else 2**33)
        cases.append(sized({"ours": 2**28} | peaks, tokens=16 * length, length=length))
    figure = figures.memory(document(*cases))
    [axis] = figure.axes
    highest = axis.transLimits.transform(axis.transScale.transform((512, 2**33)))[1]
    heights = [ys[0] for [(_, ys)] in artists(figure, "x").values()]
    assert len(set(heights)) == 4
    assert highest < min(heights) < max(heights) < 1


def test_memory_is_drawn_against_tokens_where_their_number_varies():
    cases = [sized({"ours": n * 2**10}, tokens=n, length=1024) for n in (4096, 8192, 16384)]
    figure = figures.memory(document(*cases, *(sized({"ours": 2**20}, tokens=n, length=n // 4) for n in (512, 1024))))
    assert figure.axes[0].get_xlabel() == "tokens, N"
    assert artists(figure, "o")["ours"][0][0] == [512, 1024, 4096, 8192, 16384]


def test_memory_that_ran_out_of_a_gpu_is_a_cross_too():
    cases = [sized({"ours": 2**28, "eager": 2**30}, tokens=16 * n, length=n) for n in (256, 512)]
    cases.append(
        case({"ours": entry("ours", peak_bytes=2**28), "eager": failed("eager", **OUT_OF_MEMORY)}, tokens=16384)
    )
    assert list(artists(figures.memory(document(*cases)), "x")) == ["eager PyTorch: out of memory"]


# --- errors ---------------------------------------------------------------------------------------------------


def test_errors_show_every_case_and_the_median():
    losses = (1e-6, 5e-6, 2e-6)
    cases = [case({"ours": entry("ours", errors={"loss": e, "logps_max": 1e-3})}, head=f"h{e}") for e in losses]
    idle = case({"ours": entry("ours", errors={"loss": 1.0})}, idle_share=1.0)  # of a loss that is 0
    figure = figures.errors(document(*cases, idle, case(dtype="float32")))
    ours = figure.axes[0]
    assert [list(line.get_xdata()) for line in ours.get_lines() if line.get_marker() == "o"] == [list(losses)]
    assert artists(figure, "|")["ours"][0] == ([2e-6], [0])
    assert ours.texts[0].get_text() == "2.0e-6"
    assert [axis.get_ylabel() for axis in figure.axes] == ["bfloat16", "", "", "", "float32", "", "", ""]
    assert [label.get_text() for label in figure.axes[4].get_yticklabels()] == ["ours", "eager PyTorch", "TRL"]
    assert not figure.axes[2].texts  # nobody's dhidden is known in bfloat16


# --- sweeps ---------------------------------------------------------------------------------------------------


def test_idle_prompts_are_relative_to_ones_own_time_without():
    cases = []
    for share in (0.5, 0.0, 1.0):
        found = {"ours": entry("ours", 1 - share / 2), "eager": entry("eager", 1 + share), "floor": entry("floor")}
        cases.append(case(found, idle_share=share, beta=0.0))
    left, right = figures.PICTURES["idle"](document(*cases)).axes
    drawn = [{line.get_label(): list(line.get_ydata()) for line in axis.get_lines()} for axis in (left, right)]
    assert drawn[0]["ours"] == pytest.approx([2.1, 1.575, 1.05])
    assert drawn[0]["bare matrix products"] == [2.0] * 3
    assert drawn[1] == {
        "ours": pytest.approx([1.0, 0.75, 0.5]),
        "eager PyTorch": pytest.approx([1.0, 1.5, 2.0]),
        "bare matrix products": [1.0] * 3,
    }
    assert left.get_title(loc="left") == "qwen2.5-0.5b, N 4,096, H 896, V 151,936, bfloat16, no KL"


@pytest.mark.parametrize(
    ("picture", "field"),
    [
        ("scaling-tokens", "tokens"),
        ("scaling-vocabulary", "vocab_size"),
        ("scaling-hidden", "hidden_size"),
        ("scaling-generations", "generations"),
    ],
)
def test_scaling_is_relative_to_the_floor(picture, field):
    cases = [case(head=f"h{n}" if field in ("vocab_size", "hidden_size") else "h", **{field: n}) for n in (2, 4, 8)]
    left, right = figures.PICTURES[picture](document(*cases)).axes
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in right.get_lines()}
    assert found["ours"] == ([2, 4, 8], pytest.approx([1.05] * 3))
    assert found["bare matrix products"][1] == [1.0] * 3
    assert {line.get_label() for line in left.get_lines()} == set(TITLES.values())
    assert figures.PICTURES[picture](document(*cases[:2])) is None


def test_sampling_masks_stand_beside_their_bound():
    kept = {8: 0.01, 32: 0.04, 512: 0.3}
    widths = {256: 0.1, 896: 0.2, 2048: 0.4}
    shown = document(
        *(masked(n, bound, scale=bound) for n, bound in kept.items()),
        *(masked(16, bound, head="custom", tokens=64, hidden_size=h, dtype="float32") for h, bound in widths.items()),
    )
    figure = figures.PICTURES["kept"](shown)
    lines = {(line.get_label(), len(line.get_xdata())): line for axis in figure.axes for line in axis.get_lines()}
    assert {label for label, _ in lines} == {"ours", "ours-unmasked", "bandwidth bound"}
    by_kept, by_width = figure.axes[0], figure.axes[3]
    assert [axis.axison for axis in figure.axes] == [True, False, False, True]
    for axis, bounds in ((by_kept, kept), (by_width, widths)):
        (bound,) = [line for line in axis.get_lines() if line.get_label() == "bandwidth bound"]
        assert dict(zip(bound.get_xdata(), bound.get_ydata(), strict=True)) == bounds
    (ours,) = [line for line in by_kept.get_lines() if line.get_label() == "ours"]
    assert list(ours.get_ydata()) == [2.1 * bound for bound in kept.values()]


def test_labels_do_not_overlap():
    apart = panels._apart([0.1, 0.5, 0.5, 0.52, 0.9], 0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(apart))
    assert apart[0] == 0.1 and apart[-1] == 0.9
    assert sum(apart[1:4]) / 3 == pytest.approx(0.505, abs=0.01)


# --- all pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", figures.PICTURES)
def test_small_print_says_where_and_when(name):
    on_cpu = figures.PICTURES[name](everything()).get_supxlabel()
    assert on_cpu == "Some CPU, 7 threads, AVX2, grpo-kernels 0.1.0, torch 2.99.1, 2026-01-31"
    on_gpu = figures.PICTURES[name](everything() | {"environment": ENVIRONMENT | {"device": "H200", "driver": "580.1"}})
    assert on_gpu.get_supxlabel() == "H200, driver 580.1, grpo-kernels 0.1.0, torch 2.99.1, 2026-01-31"


@pytest.mark.parametrize("name", figures.PICTURES)
def test_an_implementation_has_one_colour(name):
    of_title = {title: panels.COLOURS[key] for key, title in TITLES.items()}
    lines = [line for axis in figures.PICTURES[name](everything()).axes for line in axis.get_lines()]
    named = [line for line in lines if line.get_label() in of_title]
    assert named and all(line.get_color() == of_title[line.get_label()] for line in named)


# --- the scripts ----------------------------------------------------------------------------------------------


@pytest.fixture
def script():
    def load(name):
        spec = spec_from_file_location(f"bench_{name}_script", BENCH / f"{name}.py")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options of one optimizer step of a tiny model."""
    folder = tmp_path_factory.mktemp("learning") / "model"
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small gain nothing from threads
    start_model(folder, seed=0, vocab_size=32, hidden_size=32, num_layers=1, max_steps=2, quiet=True)
    yield [
        "--model-name-or-path", str(folder), "--dataset-name", "arithmetic", "--reward-funcs", "arithmetic",
        "--dataset-test-split", "test", "--eval-max-prompts", "4", "--beta", "0.1", "--max-completion-length", "5",
        "--max-steps", "1",
    ]  # fmt: skip
    torch.set_num_threads(before)


def test_learning_runs_every_pair_and_resumes(script, small, tmp_path, monkeypatch):
    learning, path = script("learning"), tmp_path / "results" / "learning.json"
    one_run, calls = learning.one_run, []

    def interrupted(options, *key):
        calls.append(key)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return one_run(options, *key)

    monkeypatch.setattr(learning, "one_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learning.record(path, small, [5], "the command")
    assert len(json.loads(path.read_text())["runs"]) == 2

    monkeypatch.setattr(learning, "LOSSES", learning.LOSSES[:3])
    learning.record(path, small, [5])
    pairs = [(5, "dapo", "eager"), (5, "dapo", "fused"), (5, "grpo", "fused")]
    assert calls == [*pairs, pairs[-1]]  # what was there is not run again
    learned = json.loads(path.read_text())
    assert [(run["seed"], run["loss_type"], run["loss"]) for run in learned["runs"]] == pairs
    assert learned["command"] == "the command" and learned["environment"]["threads"] == 1
    for run in learned["runs"]:
        assert [len(run[key]) for key in ("reward", "kl", "entropy")] == [1] * 3
        assert run["seconds"] > 0 and 0 < run["entropy"][0] == float(f"{run['entropy'][0]:.4g}")
    eager, fused, _ = learned["runs"]
    assert fused["entropy"] == pytest.approx(eager["entropy"], rel=1e-3)
    assert fused["pass_at_1_after"] == eager["pass_at_1_after"]


def test_learning_does_not_mix_options_or_machines(script, tmp_path, capsys):
    learning, path = script("learning"), tmp_path / "learning.json"
    here = learning.environment(torch.device("cpu"))
    before = json.dumps({"environment": here | {"threads": 99}, "options": ["--max-steps", "2"], "runs": []})
    path.write_text(before)
    with pytest.raises(ValueError, match=r"measured otherwise \(threads, options\): move it"):
        learning.record(path, [], [0])
    with pytest.raises(SystemExit):
        learning.main(["--max-steps", "3", "--output", str(path)])
    assert "error: " in capsys.readouterr().err
    assert path.read_text() == before


def test_script_draws_every_file(script, tmp_path, capsys):
    curves = {"reward": [0.1, 0.5], "kl": [0.0, 0.1], "entropy": [0.5, 0.4]}
    ends = {"seconds": 2.0, "pass_at_1_before": 0.25, "pass_at_1_after": 0.75}
    kinds = (("dapo", "eager"), ("dapo", "fused"), ("gspo", "fused"))
    runs = [{"seed": s, "loss_type": kind, "loss": loss} | curves | ends for s in (0, 1) for kind, loss in kinds]
    learned = {"environment": ENVIRONMENT, "command": "", "options": [], "runs": runs}
    (tmp_path / "learning.json").write_text(json.dumps(learned))
    (tmp_path / "cpu.json").write_text(json.dumps(document(case())))
    (tmp_path / "empty.json").write_text(json.dumps(document()))
    module = script("figures")
    module.main(["--results", str(tmp_path), "--output", str(tmp_path / "drawn")])
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert drawn == {"learning.png", "cpu-time.png", "cpu-errors.png"}
    assert "empty.json: nothing to draw" in capsys.readouterr().out

    figure = module.learning(learned)
    dapo, gspo, *_ = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in dapo.get_lines()}
    assert lines["fused, seed 1"] == lines["eager, seed 0"] == [0.1, 0.3]  # means of what came before
    assert dapo.get_title(loc="left") == "dapo: held-out pass@1 0.25 to 0.75, 0.25 to 0.75"
    legends = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in (dapo, gspo)]
    assert legends == [["eager loss", "ours"], ["ours"]]
    assert figure.get_supxlabel().startswith("Some CPU, 7 threads")
