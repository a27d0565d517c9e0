"""`grpo-kernels tune`: what it chooses, what it never chooses, and the table that it leaves. Times are made up here."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest
import torch
from triton.runtime.errors import OutOfResources

from grpo_kernels.commands import cli
from grpo_kernels.kernels import launch
from grpo_kernels.kernels.launch import MatmulLaunch, RowLaunch, row_launch
from grpo_kernels.kernels.triton import tune

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, DTYPE = 1000, torch.bfloat16
SHAPE = launch.shape_key(VOCAB, dtype=DTYPE)
SHIPPED, FAST, SLOW = RowLaunch(1, 4096, 8), RowLaunch(1, 8192, 16), RowLaunch(1, 2048, 4)
MILLISECONDS = {SHIPPED: 2.0, FAST: 1.0, SLOW: 3.0}


@pytest.fixture(autouse=True)
def _own_cache_and_made_up_times(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "gpu_milliseconds", lambda _, launches: [MILLISECONDS[launch] for launch in launches])
    launch.forget_tables()
    yield
    launch.forget_tables()


def make_subject(wrong=(), failures=None) -> tune.Subject:
    """Its result is right unless its launch is among the `wrong`, or raises what `failures` has for it."""
    prepared = []

    def run():
        prepared.pop()  # once before every run
        used = row_launch("rows", DEVICE, VOCAB, DTYPE)
        if failures and used in failures:
            raise failures[used]
        return torch.full((3,), 1.5 if used in wrong else 1.0), torch.ones(2, dtype=torch.bfloat16)

    return tune.Subject("rows", SHAPE, [SHIPPED, FAST, SLOW], lambda: prepared.append(True), run)


def chosen(choice=FAST, subject=None):
    """Write a choice; returns the table."""
    path = launch.tuned_path()
    tune.write_choice(path, launch.architecture(DEVICE), subject or make_subject(), choice)
    return json.loads(path.read_text())


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen(capsys):
    assert tune.choose(make_subject()) == FAST
    assert f"{FAST}, 1.000 ms; as shipped 2.000 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "failures", "said"),
    [
        ([FAST], {}, r"block=8192.*WRONG\n"),
        ([], {FAST: RuntimeError("no such instruction\nand more")}, "block=8192.*RuntimeError: no such instruction\n"),
        (
            [],
            {FAST: OutOfResources(300_000, 232_448, "shared memory")},
            "block=8192.*OutOfResources: out of resource",
        ),
    ],
)
def test_a_candidate_that_is_wrong_or_fails_is_reported_and_never_chosen(wrong, failures, said, capsys):
    before = row_launch("rows", DEVICE, VOCAB, DTYPE)
    assert tune.choose(make_subject(wrong, failures)) == SHIPPED
    assert len(re.findall(said, capsys.readouterr().out)) == 1
    assert row_launch("rows", DEVICE, VOCAB, DTYPE) == before  # a trial ends


# --- candidates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", tune.SHARED_MEMORY)
def test_candidates_fit_and_begin_with_the_shipped_one(arch):
    warp = 64 if arch == "gfx9" else 32
    rows = tune.row_candidates(arch)
    assert rows[0] == RowLaunch(**launch.shipped_table()[arch]["rows"]["*"]) and len(set(rows)) == len(rows) > 5
    assert all(4 <= r.block // (r.num_warps * warp) <= 32 for r in rows)
    products = tune.matmul_candidates(arch, "anchored")
    assert products[0] == MatmulLaunch(**launch.shipped_table()[arch]["anchored"]["*"])
    assert len(set(products)) == len(products) > 5
    for p in products[1:]:
        assert p.num_stages * (p.block_m + p.block_v) * p.block_h * 2 <= tune.SHARED_MEMORY[arch]
        assert arch in ("sm90", "sm100") or not p.tma


@pytest.mark.parametrize("kernel", launch.TUNABLE)
def test_the_subjects_run(kernel, monkeypatch, capsys):
    """Real kernels: on a GPU, or in the interpreter."""
    monkeypatch.setattr(tune, "architecture", lambda device: "sm90")
    if kernel == "rows":
        candidates = [RowLaunch(1, 128, 4), RowLaunch(1, 64, 1)]
    else:
        candidates = [MatmulLaunch(16, 64, 32, 4, 2, False), MatmulLaunch(32, 32, 16, 4, 2, False)]
    for subject in tune.SUBJECTS[kernel](tune.Head(32, 100, torch.float16, 4, DEVICE)):
        monkeypatch.setattr(tune, "gpu_milliseconds", lambda _, launches: range(len(launches), 0, -1))  # the last wins
        assert tune.choose(subject._replace(candidates=candidates)) == candidates[-1], capsys.readouterr().out
        assert subject.kernel == kernel and subject.shape in ("100 float32", "100 float16", "32 100 float16")


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_tuned_table_is_used():
    arch = launch.architecture(DEVICE)
    shipped = row_launch("rows", DEVICE, VOCAB, DTYPE)  # fills the caches
    table = chosen()
    assert table[arch]["rows"][SHAPE] == FAST._asdict()
    assert row_launch("rows", DEVICE, VOCAB, DTYPE) == FAST != shipped
    assert row_launch("rows", DEVICE, VOCAB + 1, DTYPE) == shipped == row_launch("rows", DEVICE, VOCAB, torch.float32)


def test_a_table_is_extended():
    other = tune.Subject("rows", "77 float32", [], print, list)
    chosen(SLOW, other)
    chosen(SLOW)
    table = chosen()
    assert table[launch.architecture(DEVICE)]["rows"] == {"77 float32": SLOW._asdict(), SHAPE: FAST._asdict()}
    assert [path.name for path in launch.tuned_path().parent.iterdir()] == ["launch.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"sm90": 3}'])
def test_a_broken_table_stops_before_anything_is_measured(text):
    launch.tuned_path().write_text(text)
    with pytest.raises(tune.TableError, match=r"launch\.json .*--output"):
        tune.tune(tune.Head(1, 1, DTYPE, 1, DEVICE), ["rows"], launch.tuned_path())
    with pytest.raises(tune.TableError):
        chosen()
    assert launch.tuned_path().read_text() == text


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        status = cli.main(["tune", *arguments])
    return status, text.getvalue()


def test_without_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, text = command()
    assert status == 2 and text.count("\n") == 1 and "GPU" in text
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    status, text = command()
    assert status == 2 and text.count("\n") == 1 and "TRITON_INTERPRET" in text


def test_the_command_tunes_what_it_is_told(monkeypatch, tmp_path):
    heads = []

    def subjects(head):
        heads.append(head)
        return [make_subject()]

    monkeypatch.setattr(cli, "interpreted", lambda: False)
    monkeypatch.setattr(cli, "why_unusable", lambda: "")
    monkeypatch.setattr(tune, "architecture", lambda device: "sm90")
    monkeypatch.setitem(tune.SUBJECTS, "rows", subjects)
    path = tmp_path / "new" / "table.json"
    options = ["--width", "16", "--vocab", "1000", "--dtype", "float16", "--rows", "8", "--kernels", "rows"]
    assert command(*options, "--output", str(path)) == (0, "")
    assert heads == [tune.Head(16, 1000, torch.float16, 8, torch.device("cuda"))]
    assert json.loads(path.read_text())["sm90"]["rows"] == {SHAPE: FAST._asdict()}
    assert not launch.tuned_path().exists()

    path.write_text("nothing")
    status, text = command(*options, "--output", str(path))
    assert status == 1 and text.count("\n") == 1 and str(path) in text


def test_an_unknown_kernel_is_refused():
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as text:
        cli.main(["tune", "--kernels", "rows,colums"])
    assert "colums" in text.getvalue() and "linear_logp" in text.getvalue()
