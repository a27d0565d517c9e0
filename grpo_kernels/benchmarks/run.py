"""Many jobs, one after another, within a number of minutes; the document is written after each."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import torch

from .document import Document, read, write
from .implementations import implementations
from .limits import predictions
from .machine import environment, now
from .measure import NOT_RUN, measure
from .memory import weigh
from .process import Tell
from .sets import Job

ROUNDS = {"cpu": 3, "cuda": 15}
_WORTH_STARTING_S = 10.0  # of the time that is left
_SAME = ("device", "driver", "cpu", "threads", "versions")  # of the environment, in all cases of a document


class Run:
    """Jobs measured one by one into one document, until the time is up."""

    def __init__(
        self,
        device: torch.device,
        *,
        command: str,
        output: Path | None = None,
        rounds: int | None = None,
        minutes: float | None = None,
        resume: bool = False,
    ) -> None:
        """`resume`: go on with what is at `output`; ValueError where another machine or other versions wrote that."""
        self.device = device
        self.rounds = rounds or ROUNDS[device.type]
        self.end = time.time() + 60 * minutes if minutes else float("inf")
        self.output = output
        here = environment(device)
        self.document: Document = {
            "environment": here,
            "command": command,
            "cases": _complete(output, here) if resume and output is not None else [],
            "not_run": [],
        }

    def measure(self, job: Job, tell: Tell = lambda text: None) -> Document | None:
        """What was found of a job, which the document then has too; None where no time is left."""
        case = asdict(job.case)
        for there in self.document["cases"]:
            if there["case"] == case:
                return there
        found = None
        if self.end - time.time() < _WORTH_STARTING_S:
            self.document["not_run"].append(str(job.case))
        else:
            found = self._measured(job, tell)
            self.document["cases"].append(found)
        if self.output is not None:
            write(self.output, self.document)
        return found

    def _measured(self, job: Job, tell: Tell) -> Document:
        names = job.names()
        found: Document = {"implementations": {name: {"title": implementations()[name].title} for name in names}}
        if job.timed:
            found = measure(job.case, names, str(self.device), self.rounds, job.tuned, self.end, tell)
        reports = found["implementations"]
        if self.device.type == "cpu":  # a GPU has weighed while it measured
            for name in job.weighed_names():
                late = time.time() > self.end
                reports.setdefault(name, {}).update({"memory_error": NOT_RUN} if late else weigh(job.case, name, tell))
        if "peak_bytes" in reports.get("eager", {}):
            for report in reports.values():
                if "peak_bytes" in report:
                    report["memory_ratio_to_eager"] = report["peak_bytes"] / reports["eager"]["peak_bytes"]
        predicted = predictions(job.case, self.device)
        return {"case": asdict(job.case), "date": now(), "predicted": predicted} | found


def _complete(path: Path, here: Document) -> list[Document]:
    """The cases of an earlier run in which all implementations were measured, time and memory, if in fewer rounds."""
    if not path.exists():
        return []
    document = read(path)
    differ = [name for name in _SAME if document["environment"].get(name) != here[name]]
    if differ:
        raise ValueError(f"{path} was measured otherwise ({', '.join(differ)}): move it, or do not resume")
    return [
        found
        for found in document["cases"]
        if not any(
            NOT_RUN in (report.get("error"), report.get("memory_error")) for report in found["implementations"].values()
        )
    ]
