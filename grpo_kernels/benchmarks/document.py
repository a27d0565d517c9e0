"""The JSON of a run: {"environment", "command", "cases", "not_run"}; written whole after every case.

A case is {"case": its fields, "predicted": of limits.py, "clocks", "implementations": name -> what was found}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def write(path: Path, document: Document) -> None:
    """Atomically: an interrupted run keeps the cases before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(document, indent=1, default=str) + "\n")
    draft.replace(path)


def read(path: Path) -> Document:
    document: Document = json.loads(path.read_text())
    return document
