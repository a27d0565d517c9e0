"""Launch configurations of Triton kernels: the user's table, and the shipped one behind it."""

from __future__ import annotations

import json

import pytest
import torch

from grpo_kernels.kernels import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_users_table_comes_before_the_shipped_one(monkeypatch, tmp_path):
    def row_launch(table, vocab=1000):
        launch.tuned_path().write_text(table)
        launch._find.cache_clear()
        launch._tuned_table.cache_clear()
        return launch.row_launch(DEVICE, vocab, torch.bfloat16)

    monkeypatch.setenv("GRPO_KERNELS_CACHE", str(tmp_path))
    shipped, own = row_launch("{}"), launch.RowLaunch(1, 64, 2)
    table = json.dumps({launch.architecture(DEVICE): {"rows": {"1000 bfloat16": own._asdict()}}})
    assert row_launch(table) == own != shipped == row_launch(table, vocab=1001)
    with pytest.warns(UserWarning, match=r"launch\.json cannot be read"):
        assert row_launch("[]") == shipped
    row_launch("{}")
