"""The table of the operations in PyTorch."""

from __future__ import annotations

from ..operations import Backend
from . import gathered, rows

TORCH = Backend(
    name="torch",
    statistics=rows.statistics,
    gradient=rows.gradient,
    divergence=rows.divergence,
    sparse_gradient=rows.sparse_gradient,
    allowed_ids=gathered.allowed_ids,
    gathered_logits=gathered.gathered_logits,
    gathered_dhidden=gathered.gathered_dhidden,
    gathered_dweight=gathered.gathered_dweight,
    scale=rows.scale,
    scale_rows=rows.scale_rows,
)


def load() -> tuple[Backend, str]:
    """Returns (table, "")."""
    return TORCH, ""
