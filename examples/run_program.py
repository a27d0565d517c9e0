"""A reward that runs the program in a completion and compares what it prints, in a process with limits.

This is no sandbox. The limits end programs that hang, fill the memory or print without end; nothing keeps a program
from what you may do yourself: it can read your files and keys, delete what you own, use the network, start processes
that outlive it, and read the answers of this data set. Programs of a model belong where nothing else is: in a container
without network, as a user of its own, under gVisor (docker run --runtime runsc --network none --user 65534), in a
virtual machine, or in a service whose trade it is (Firecracker, E2B, Modal, SandboxFusion); let `output_of` call it.

The rows have the columns prompt, input (what the program reads) and output (what it has to print):
grpo-kernels train --model-name-or-path MODEL --dataset-name rows.jsonl --reward-funcs examples/run_program.py:passes
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CPU_SECONDS, WALL_SECONDS = 2, 10
MEMORY, FILE_BYTES = 1 << 30, 1 << 20  # FILE_BYTES: of what it prints, and of each file that it writes
START = f"""
import resource, runpy
for name, most in {{"CPU": {CPU_SECONDS}, "AS": {MEMORY}, "FSIZE": {FILE_BYTES}}}.items():
    resource.setrlimit(getattr(resource, f"RLIMIT_{{name}}"), (most, most))
runpy.run_path("program.py", run_name="__main__")
"""
FENCED = re.compile(r"```(?:python)?[ \t]*\n(.*?)```", re.DOTALL)


def output_of(program, text):
    """Returns what the program prints after reading `text`, or None where it fails or a limit ends it."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", START], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL,
            cwd=folder, env={}, start_new_session=True,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(text.encode(), timeout=WALL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        if process.wait() != 0:
            return None
        out.seek(0)
        return out.read().decode(errors="replace")


def passes(completions, input, output, **_):
    """1 where the last fenced block, or all of the text, is a program that prints `output`."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    programs = [[text, *FENCED.findall(text)][-1] for text in texts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = zip(pool.map(output_of, programs, input), output, strict=True)
        return [float(out is not None and out.split() == right.split()) for out, right in pairs]
