"""Times launch configurations of a Triton kernel on this GPU, for one lm_head; prints them, the fastest first.

    python bench/tune.py --kernel rows --shape llama-3-8b:16384
    python bench/tune.py --kernel fused_logp --shape llama-3-8b:16384 --mode forward

What is timed is a whole step of backend "triton". A candidate that fails or gives wrong results is named. The best one
belongs into ~/.cache/grpo_kernels/launch.json, or where it serves many into grpo_kernels/kernels/launch.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo_kernels.benchmarks.cases import DTYPES, MODES, make_case
from grpo_kernels.benchmarks.implementations.ours import make_step
from grpo_kernels.benchmarks.inputs import make_inputs
from grpo_kernels.benchmarks.measure import interleave
from grpo_kernels.benchmarks.reference import errors, off_policy, reference, why_wrong
from grpo_kernels.kernels.launch import TUNABLE, MatmulLaunch, RowLaunch, trial

CANDIDATES: dict[type, dict[str, tuple[Any, ...]]] = {
    RowLaunch: dict(rows=(1,), block=(2048, 4096, 8192, 16384), num_warps=(4, 8, 16, 32)),
    MatmulLaunch: dict(
        block_m=(64, 128, 256), block_v=(128, 256), block_h=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4, 5),
        tma=(False, True),
    ),
}  # fmt: skip


def candidates(kernel: str) -> Iterator[RowLaunch | MatmulLaunch]:
    kind = TUNABLE[kernel]
    for values in itertools.product(*CANDIDATES[kind].values()):
        yield kind(**dict(zip(CANDIDATES[kind], values, strict=True)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=TUNABLE, default="rows")
    parser.add_argument("--shape", default="llama-3-8b:16384", help="as of grpo-kernels bench")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--mode", choices=MODES, default="step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    inputs = off_policy(make_inputs(make_case(chosen.shape, chosen.dtype, mode=chosen.mode), device))
    right, step = reference(inputs, chosen.mode, "grpo"), make_step(inputs, chosen.mode, backend="triton")
    calls: dict[str, Callable[[], object]] = {"as shipped": lambda: step(inputs)}
    for launch in candidates(chosen.kernel):

        def call(launch: RowLaunch | MatmulLaunch = launch) -> Any:
            with trial(chosen.kernel, launch):
                return step(inputs)

        try:
            result = call()
            wrong = why_wrong(right, result, errors(right, result), inputs.hidden.dtype)
        except Exception as error:  # of Triton, for a launch that the GPU has no room for
            wrong = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if wrong:
            print(f"left out: {launch}: {wrong}", flush=True)
        else:
            calls[str(launch)] = call
    times = interleave(calls, chosen.rounds, device)
    for name in sorted(times, key=lambda name: times[name]["median"]):
        print(f"{times[name]['median'] * 1e3:9.3f} ms  {name}")


if __name__ == "__main__":
    main()
