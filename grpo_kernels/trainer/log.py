"""What a run writes while it goes: log.jsonl, samples.jsonl, a progress bar, and trackers of accelerate."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

LOG, SAMPLES = "log.jsonl", "samples.jsonl"


class RunLog:
    """Records of a run; on ranks but the first it writes nothing. `positions` are file sizes, for checkpoints."""

    def __init__(self, folder: Path, accelerator: Accelerator, *, steps: int, quiet: bool):
        self.accelerator, self.writes = accelerator, accelerator.is_main_process
        self.paths = {name: folder / name for name in (LOG, SAMPLES)}
        self.bar = tqdm(total=steps, desc="GRPO", disable=quiet or not self.writes, dynamic_ncols=True)

    def start(self, positions: Mapping[str, int], step: int) -> None:
        """Begin, or go on after `step`: what was written after that checkpoint is cut off."""
        if self.writes:
            for name, path in self.paths.items():
                path.touch()
                os.truncate(path, min(positions.get(name, 0), path.stat().st_size))
        self.bar.n = step
        self.bar.refresh()

    def record(self, record: dict[str, Any]) -> None:
        """One optimizer step, or one evaluation."""
        self._append(LOG, record)
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        if "evaluation" in record:
            flat = record["evaluation"]
            numbers = {f"evaluation/{k}": v for k, v in flat.items() if isinstance(v, (int, float))}
        self.accelerator.log(numbers, step=record["step"])
        if "loss" in record:
            self.bar.update(1)
            shown = {k: f"{record[k]:.3g}" for k in ("reward", "kl", "entropy", "grad_norm") if k in record}
            self.bar.set_postfix(shown)

    def sample(self, sample: dict[str, Any]) -> None:
        self._append(SAMPLES, sample)

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self.writes:
            tqdm.write(text, file=sys.stderr)

    @property
    def positions(self) -> dict[str, int]:
        return {name: path.stat().st_size for name, path in self.paths.items()} if self.writes else {}

    def close(self) -> None:
        self.bar.close()

    def _append(self, name: str, record: dict[str, Any]) -> None:
        if self.writes:
            with self.paths[name].open("a") as file:
                file.write(json.dumps(_finite(record), default=str) + "\n")


def _finite(value: Any) -> Any:
    """NaN and infinite numbers, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
