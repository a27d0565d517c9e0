"""The other end of `gpu_device.each`: probes that run a list of items, one process for as many as it survives.

A probe says `begin` and `end` of every item, and `at` before whatever may hang. An item that hangs or kills its process
is named by the last of these lines; whether the items after it get a new process is the caller's choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_machine import PROBES
from gpu_work import last_line

if TYPE_CHECKING:
    from gpu_work import Ended, Work

SILENCE = {"cuda": 40.0, "triton": 150.0}  # seconds; Triton compiles
LEAST = 5.0  # seconds that a process needs to say anything


class Told(NamedTuple):
    """`ended`: item to what was found. `at`: what was under way when the process ended, or nothing."""

    ended: dict[str, dict[str, Any]]
    facts: list[dict[str, Any]]
    item: str
    at: str
    said: str


def read(output: str) -> Told:
    """What a probe said; `said` is all that was no JSON, the device's printf for example."""
    ended: dict[str, dict[str, Any]] = {}
    facts: list[dict[str, Any]] = []
    item = at = ""
    rest = []
    for line in output.splitlines():
        match = re.search(r"\{.*\}$", line)
        try:
            fact = json.loads(match[0]) if match else None
        except ValueError:
            fact = None
        if fact is None:
            rest.append(line)
        elif "begin" in fact:
            item, at = fact["begin"], ""
        elif "end" in fact:
            ended[fact.pop("end")] = fact
            item = at = ""
        elif "at" in fact:
            at = fact["at"]
        else:
            facts.append({"item": item, **fact} if item else fact)
    return Told(ended, facts, item, at, "\n".join(rest)[-1500:].strip())


def silence_of(probe: str) -> float:
    """Seconds. CUDA's kernels are compiled already: what is silent for longer hangs."""
    return SILENCE["triton"] if "triton" in probe else SILENCE["cuda"]


def run(
    work: Work, probe: str, items: Sequence[str], variables: Mapping[str, str] | None = None, go_on: bool = False
) -> Told:
    """`ended` has an entry for each item that was begun; "lost": it took the process with it.

    `go_on`: after a hang or a lost device the items that are left get a new process.
    """
    ended: dict[str, dict[str, Any]] = {}
    facts: list[dict[str, Any]] = []
    rest = list(items)
    told = Told(ended, facts, "", "", "")
    while rest and work.left > LEAST:
        process = work.python(PROBES, probe, *rest, silence=silence_of(probe), variables=variables)
        told = read(process.output)
        ended |= told.ended
        facts += told.facts
        if process.code in (0, 1) and set(rest) <= set(ended):
            break
        culprit = told.item or (list(told.ended)[-1] if told.ended else rest[0])
        found = ended.setdefault(culprit, {"ok": False, "error": why(process, told)})
        if process.stopped and "silence" not in process.stopped:
            found["unfinished"] = True  # for want of time, which says nothing about it
            break
        found |= {"ok": False, "lost": True} | ({"said": told.said} if told.said else {})
        rest = [item for item in rest if item not in ended]
        if not go_on:
            break
    return told._replace(ended=ended, facts=facts)


def why(process: Ended, told: Told) -> str:
    text = process.stopped or f"the process ended with {process.code}: {last_line(told.said)}"
    return text + (f" at {told.at}" if told.at else "")
