"""The table of the operations in PyTorch."""

from __future__ import annotations

from ..operations import Backend
from . import kept, rows

TORCH = Backend(
    name="torch",
    statistics=rows.statistics,
    gradient=rows.gradient,
    divergence=rows.divergence,
    sparse_gradient=rows.sparse_gradient,
    kept_ids=kept.kept_ids,
    kept_logits=kept.kept_logits,
    kept_dhidden=kept.kept_dhidden,
    kept_dweight=kept.kept_dweight,
    scale=rows.scale,
    scale_rows=rows.scale_rows,
)


def load() -> tuple[Backend, str]:
    """Returns (table, "")."""
    return TORCH, ""
