"""Hostile programs in the sandbox: each is stopped, the next one runs, nothing outside changes, no process is left."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_kernels.trainer.rewards import Code, Limits, Sandbox
from grpo_kernels.trainer.rewards import sandbox as module
from grpo_kernels.trainer.rewards.programs import read_tests, verdicts

SECRET = "gold-0123456789"
REWARDS = Path(module.__file__).parent


class Patient(Limits):
    wall_seconds = 60  # however busy this machine is


class Impatient(Limits):
    wall_seconds = 1


LIMITS = Patient(cpu_seconds=1, memory_mb=512, scratch_mb=16, output_kb=64)
UNHURRIED = dataclasses.replace(LIMITS, cpu_seconds=60)  # for what has to be stopped by something else
ASLEEP = Impatient(cpu_seconds=60)
CLOSED = """
import os, signal, sys, threading, time
for descriptor in range(64):
    try: os.close(descriptor)
    except OSError: pass
for number in {*signal.Signals} - {9, 19}:
    signal.signal(number, signal.SIG_IGN)
"""


@pytest.fixture(scope="module")
def sandbox():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOLD", SECRET)
        sandbox = Sandbox(LIMITS)
        assert sandbox.run("print(1)").stdout == "1\n"
    yield sandbox
    sandbox.close()


@pytest.fixture
def outside():
    """A folder that every user of this machine may change: nothing but the sandbox protects it."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-kernels-test-", dir="/var/tmp"))
    folder.chmod(0o777)
    for name in ("kept", "tests.jsonl"):
        (folder / name).write_text(SECRET)
        (folder / name).chmod(0o666)
    yield folder
    shutil.rmtree(folder)


def state_of(folder):
    found = {path.name: (path.read_text(), path.stat().st_mode) for path in folder.iterdir()}
    return found, [folder.stat().st_mode, *(path.stat().st_mtime_ns for path in folder.iterdir())]


def processes_below(pid):
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, new = set(), {pid}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in found} - found
    return found & parents.keys()


HOSTILE = {  # name: program, what stops it (a reason, or an error that it gets)
    "fork bomb": ("import os\nwhile True:\n  try:\n    os.fork()\n  except OSError: pass", "CPU time"),
    "raw fork": (
        """
        import ctypes, platform
        calls = [56, 57, 58, 435] if platform.machine() == "x86_64" else [220, 435]  # clone, fork, vfork, clone3
        print([ctypes.CDLL(None).syscall(n, 17, 0, 0, 0, 0) for n in calls])
        assert False""",
        "AssertionError",
    ),
    "double fork": ("import os\nos.setsid()", "PermissionError"),
    "exec": ("import os\nos.execv('/bin/sleep', ['sleep', '1000'])", "PermissionError"),
    "endless loop that ignores signals": (
        "import signal\nfor s in {*signal.Signals} - {9, 19}:\n  signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "CPU time",
    ),
    "sleep": ("import time\nprint(1, flush=True)\ntime.sleep(10**6)", "wall clock"),
    "sleep without descriptors": (CLOSED + "time.sleep(10**6)", "wall clock"),
    "sleep at its end": (CLOSED + "threading.Thread(target=time.sleep, args=(10**6,)).start()", "wall clock"),
    "endless loop without descriptors": (CLOSED + "while True: pass", "CPU time"),
    "slow regular expression": ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", "CPU time"),
    "100 GB": ("x = bytearray(100 << 30)", "MemoryError"),
    "100 GB of memory files": ("import os\nos.memfd_create('x')", "PermissionError"),
    "100 GB on disk": ("for i in range(10**6):\n  with open(f'{i}', 'wb') as f: f.write(bytes(1 << 22))", "OSError"),
    "threads": (
        """
        import threading, time
        threading.stack_size(1 << 15)
        for _ in range(100):
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()""",
        "can't start new thread",
    ),
    "deep folders": ("import os\nwhile True:\n  os.mkdir('d')\n  os.chdir('d')", "OSError"),
    "gigabytes of output": ("while True: print('x' * 10**6)", "output limit"),
    "gigabytes of values": ("import os\nwhile True: os.write(3, b'x' * 10**6)", "output limit"),
    "other descriptors": ("import os\nfor i in range(4, 4096): os.write(i, b'{}')", "OSError"),
    "internet": ("import socket\nsocket.create_connection(('1.1.1.1', 53))", "PermissionError"),
    "kill all": ("import os\nos.kill(-1, 9)", "PermissionError"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "kill by fcntl": ("import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())", "PermissionError"),
    "more for itself": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "not allowed"),
    "trace": ("import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0", "AssertionError"),
    "mount": ("import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, None) == 0", "AssertionError"),
    "namespaces": ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
    "crash": ("import ctypes\nctypes.string_at(0)", "signal"),
    "parent's environment": ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "PermissionError"),
    "trainer's environment": ("open('/proc/TRAINER/environ').read()", "Error"),
    "trainer's memory": ("open('/proc/TRAINER/mem', 'rb').read(1)", "Error"),
    "reads the tests": ("print(open('OUTSIDE/tests.jsonl').read())", "PermissionError"),
    "deletes files": ("import os\nos.remove('OUTSIDE/kept')", "PermissionError"),
    "writes": ("open('OUTSIDE/kept', 'w')", "PermissionError"),
    "creates": ("open('OUTSIDE/new', 'x')", "PermissionError"),
    "makes a folder": ("import os\nos.mkdir('OUTSIDE/new')", "PermissionError"),
    "truncates": ("import os\nos.truncate('OUTSIDE/kept', 0)", "PermissionError"),
    "truncates by reading": ("import os\nos.open('OUTSIDE/kept', os.O_RDONLY | os.O_TRUNC)", "PermissionError"),
    "renames": ("import os\nos.rename('OUTSIDE/kept', 'OUTSIDE/lost')", "PermissionError"),
    "moves away": ("import os\nos.rename('OUTSIDE/kept', 'kept')", "Error"),
    "links": ("import os\nos.symlink('OUTSIDE/kept', 'link')\nopen('link', 'w')", "PermissionError"),
    "changes the mode": ("import os\nos.chmod('OUTSIDE/kept', 0)", "PermissionError"),
    "changes an attribute": ("import os\nos.setxattr('OUTSIDE/kept', 'user.a', b'1')", "PermissionError"),
    "writes the interpreter": ("import os\nopen(os.__file__, 'a')", "PermissionError"),
    "locks the interpreter": ("import fcntl, os\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX)", "PermissionError"),
    "leases the interpreter": ("import fcntl, os\nfcntl.fcntl(open(os.__file__), 1024, 0)", "PermissionError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, sandbox, outside, monkeypatch):
    program, stopped_by = HOSTILE[name]
    monkeypatch.setattr(sandbox, "limits", {"CPU time": LIMITS, "wall clock": ASLEEP}.get(stopped_by, UNHURRIED))
    program = textwrap.dedent(program).replace("OUTSIDE", str(outside)).replace("TRAINER", str(os.getpid()))
    if name == "double fork":
        program += "\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    while True: pass"
    before, waiting = state_of(outside), processes_below(sandbox._process._process.pid)
    outcome = sandbox.run(program)
    if stopped_by == "signal":
        assert outcome.status < 0 and not outcome.reason
    elif outcome.reason:
        assert outcome.reason == stopped_by
    else:
        assert outcome.status and stopped_by in outcome.stderr, outcome
    assert len(outcome.stdout) <= 64 << 10 and SECRET not in outcome.stdout + outcome.stderr
    assert state_of(outside) == before
    assert processes_below(sandbox._process._process.pid) == waiting, "none of its processes is left"
    assert sandbox.run("print(input())", stdin="next").stdout == "next\n"


SCAN = """
import ctypes, os, re, sys
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
reader, writer = os.pipe()
def content(page):
    return os.read(reader, 4096) if libc.write(writer, ctypes.c_void_p(page), 4096) == 4096 else b""
top = libc.sbrk(0) & -4096
pages = set(range(top - (1 << 24), top, 4096))  # malloc's memory, and the megabytes of Python's objects
for module in list(sys.modules.values()):
    for value in vars(module).values():
        pages.update(range(id(value) >> 20 << 20, (id(value) >> 20) + 1 << 20, 4096))
text = b"".join(map(content, pages))
print(len(text) > 1 << 21, re.findall(rb"gold-[0-9]+", text))
"""


def test_no_program_finds_another_request(sandbox, monkeypatch):
    """In the memory that it has of the process which forks it."""
    monkeypatch.setattr(sandbox, "limits", UNHURRIED)
    for _ in range(3):
        text = (SECRET + " ") * 50
        assert SECRET in sandbox.run(f"x = {text!r}\nprint(x + input())", stdin=text).stdout
        assert SECRET in sandbox.run("def f(x): return x", calls=[f"f({text!r})"]).values
    assert sandbox.run(SCAN).stdout == "True []\n"


def test_no_program_reads_what_lies_beside_the_interpreter(tmp_path):
    """The virtual environment of a project whose folder it is."""
    venv.create(tmp_path, with_pip=False)
    tmp_path.chmod(0o755)
    names = ["tests.jsonl", ".env", "lib/tests.jsonl", "bin/tests.jsonl"]
    for name in names:
        (tmp_path / name).write_text(SECRET)
    program = f"""
    import os, sysconfig
    assert os.listdir(sysconfig.get_path("purelib")) == []
    for name in [".", *{names}]:
        try: print(os.listdir({str(tmp_path)!r}) if name == "." else open({str(tmp_path)!r} + "/" + name).read())
        except OSError: pass
    """
    code = f"print(Sandbox().run({textwrap.dedent(program)!r}))"
    out, err = start(code, python=tmp_path / "bin" / "python").communicate(timeout=600)
    assert out.startswith("Outcome(stdout='', stderr='',") and "status=0" in out, out + err


def test_what_a_program_may_do(sandbox):
    program = """
    import os, random, sys, threading, time, decimal, zlib, ctypes
    print(sorted(os.environ), os.getcwd() == os.environ["HOME"] or os.getcwd() == "/")
    time.sleep(0.01)
    print(hash("a"), sys.stdin.read())
    """
    first, second = (sandbox.run(textwrap.dedent(program), stdin="ä\n") for _ in range(2))
    assert first.status == 0 and first.stdout == second.stdout, first
    assert "GOLD" not in first.stdout and first.stdout.endswith("ä\n\n")
    files = sandbox.run("import os; print(os.listdir()); open('a', 'w').write('b'); print(open('a').read())")
    threads = sandbox.run("import threading\nthreading.Thread(target=print, args=('thread',)).start()")
    if not sandbox.missing:
        assert files.stdout == "[]\nb\n" and threads.stdout == "thread\n"
        assert sandbox.run("import os; print(os.listdir())").stdout == "[]\n", "a folder for each program"
        assert sandbox.run("import numpy; print(numpy.eye(3) @ numpy.ones(3))").stdout == "[1. 1. 1.]\n"


def test_programs_score_as_plain_python_runs_them(tmp_path):
    """A corpus: each of them ends with status 0. Those with an assert as the last line are tested by their values."""
    parts = (Path(__file__).parent / "data" / "programs.txt").read_text("utf-8").split("#### ")[1:]
    corpus, stdin = dict(part.split("\n", 1) for part in parts), "3 4\nhello ä\n\n1 2 3\n"
    tests = {}
    environment = {"PYTHONUTF8": "1", "TMPDIR": str(tmp_path)}

    def plain(program):
        command = [sys.executable, "-s", "-c", program]
        found = subprocess.run(command, input=stdin.encode(), capture_output=True, cwd=tmp_path, env=environment)
        assert found.returncode == 0, found.stderr
        return found.stdout.decode()

    with ThreadPoolExecutor(2) as pool:
        outputs = dict(zip(corpus, pool.map(plain, corpus.values()), strict=True))
    for name, program in corpus.items():
        *_, last = program.splitlines()
        call = last.startswith("assert ")
        tests[name] = [last] if call else [{"input": stdin, "output": outputs[name]}]
        corpus[name] = program.removesuffix(last + "\n") if call else program
    code = Code(Patient(cpu_seconds=10), workers=2)
    scores = dict(zip(corpus, code(list(corpus.values()), list(tests.values())), strict=True))
    code.close()
    assert len(corpus) >= 35 and [name for name, score in scores.items() if score != 1.0] == []


CHEATS = {
    "leaves": "import sys\nsys.exit(0)",
    "leaves in the call": "import os\ndef add(a, b): os._exit(0)",
    "equals everything": """
        class Same(int):
            __eq__ = lambda self, other: True
            __hash__ = int.__hash__
        def add(a, b): return Same(0)""",
    "says it is a list": """
        class Same:
            tolist = lambda self: self
        def add(a, b): return Same()""",
    "writes values itself": """
        import os
        os.write(3, b'["number", true]\n["number", true]\n')
        os._exit(0)""",
    "writes values anew": """
        import os
        for d in (1, 2, 3):
            os.ftruncate(d, 0)
            os.lseek(d, 0, 0)
        os.write(3, b"[]" * 9)""",
    "writes foreign values": 'import os\nos.write(3, b\'["dict", 1]\n{"number": 0}\')\nos._exit(0)',
    "overwrites the harness": """
        import builtins, json, sys
        builtins.eval = lambda *a: True
        json.dumps = lambda *a: '["number", true]'
        main = sys.modules["__main__"]
        main.encode = lambda value: True
        def add(a, b): return a""",
    "looks for the expected values": """
        import gc, sys
        def add(a, b):
            frame, found = sys._getframe(), []
            while frame:
                found.append(repr(frame.f_locals))
                frame = frame.f_back
            found += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list))]
            text = "".join(found)
            return 987654321 if "987654321" in text else 0""",
}
TESTS = read_tests(["assert add(1, 2) == 3", {"call": "add(987654320, 1)", "output": 987654321}])


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(name, sandbox):
    assert not all(verdicts(textwrap.dedent(CHEATS[name]), TESTS, sandbox))
    assert all(verdicts("def add(a, b): return a + b", TESTS, sandbox))


def test_it_ends_with_the_trainer():
    """SIGKILL to the process that owns a sandbox, in the middle of a program: its processes go too."""
    code = f"""
    sandbox = Sandbox(Limits(cpu_seconds=600))
    sandbox.run("print(1)")
    print(sandbox._process._process.pid, flush=True)
    input()
    sandbox.run({CLOSED + "time.sleep(10**6)"!r})
    """
    owner = start(code)
    pid = int(owner.stdout.readline())
    waiting = processes_below(pid)
    print(file=owner.stdin, flush=True)
    wait_until(lambda: processes_below(pid) > waiting)
    below = processes_below(pid)
    owner.kill()
    owner.wait()  # not for the end of its output, which its processes have as well
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert owner.stderr.read() == "", "nothing about a pipe that is closed"


def test_a_killed_sandbox_starts_again():
    sandbox = Sandbox(LIMITS)
    assert sandbox.run("print(1)").stdout == "1\n"
    sandbox._process._process.kill()
    sandbox._process._process.wait()  # or what it has started may still answer
    with pytest.raises(module.SandboxFailure, match="ended with status -9"):
        sandbox.run("print(2)")
    assert sandbox.run("print(3)").stdout == "3\n"
    pid = sandbox._process._process.pid
    sandbox.close()
    assert not processes_below(pid)


# ---- machines that offer less ----------------------------------------------------------------------------------------

# Without torch: the modules of this folder, as a package of another name.
PREAMBLE = f"""
import json, os, sys, types, warnings
package = types.ModuleType("rewards")
package.__path__ = [{str(REWARDS)!r}]
sys.modules["rewards"] = package
from rewards.sandbox import Limits, Sandbox, SandboxUnavailable
from rewards import inside
class Patient(Limits):
    wall_seconds = 60
def forbid(numbers):
    column = inside.MACHINES[os.uname().machine][0]
    code = [(inside.LOAD, 0, 0, 0)]
    for pair in numbers:
        code += [(inside.EQUAL, 0, 1, pair[column]), (inside.RETURN, 0, 0, inside.FAIL + 1)]
    inside.filter_syscalls(code + [(inside.RETURN, 0, 0, inside.ALLOW)])
"""
UNSHARE, MOUNT, LANDLOCK, SETRESUID = (272, 97), (165, 40), (444, 444), (117, 147)


def start(code, preamble=PREAMBLE, python=sys.executable, env=None, **options):
    command = [python, "-c", preamble + textwrap.dedent(code)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env={**os.environ, **(env or {})}, **pipes, **options)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# Prints what programs do that should fail, and what a program may do there.
TRY_ALL = """
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    sandbox, other = Sandbox(Patient(cpu_seconds=1)), Sandbox(Patient())
    other.run("")
    programs, own = json.load(sys.stdin), str(os.getpid())
    outcomes = {name: sandbox.run(program.replace("TRAINER", own)) for name, program in programs.items()}
    loop = sandbox.run("while True: pass").reason
    right = sandbox.run("print(sum([1, 2]))").stdout
    scratch = sandbox.run("open('a', 'w')").status
    sandbox.close()
    other.close()
wrong = [name for name, outcome in outcomes.items() if not outcome.status or "gold" in outcome.stdout + outcome.stderr]
print(json.dumps([wrong, loop, right, scratch, [str(w.message) for w in caught], sandbox.missing]))
"""


def checked(process, outside, every=5):
    """Runs every so many of the hostile programs that need little time."""
    quick = [name for name, (_, reason) in HOSTILE.items() if reason not in ("CPU time", "wall clock")]
    programs = {name: textwrap.dedent(HOSTILE[name][0]).replace("OUTSIDE", str(outside)) for name in quick[::every]}
    before = state_of(outside)
    out, err = process.communicate(json.dumps(programs), timeout=600)
    assert process.returncode == 0, err
    wrong, loop, right, scratch, caught, missing = json.loads(out)
    assert not wrong and loop == "CPU time" and right == "3\n" and state_of(outside) == before
    return scratch, caught, missing


@pytest.mark.parametrize("number", [UNSHARE, MOUNT], ids=["unshare", "mount"])
def test_without_namespaces_it_says_so_once(number, outside):
    """As in a container of Docker's defaults, and under Ubuntu's restriction of user namespaces."""
    scratch, caught, missing = checked(
        start(f"forbid([{number}])\n" + TRY_ALL), outside, every=1 if number == MOUNT else 5
    )
    text = "namespaces (Operation not permitted)"
    assert len(caught) == 1 and text in caught[0] and "cannot write files or start threads" in caught[0]
    assert scratch == 1 and text in missing


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a user id to give up")
def test_root_that_cannot_change_its_user_id(outside):
    _, caught, missing = checked(start(f"forbid({[SETRESUID]})\n" + TRY_ALL), outside)
    assert len(caught) == 1 and len(missing) == 1 and "user id of nobody" in missing[0]


def test_without_landlock_it_refuses():
    code = f"""
    forbid({[LANDLOCK]})
    try:
        Sandbox().run("print(1)")
    except SandboxUnavailable as error:
        print(error)
    """
    out, err = start(code).communicate(timeout=600)
    assert out.startswith("programs cannot be isolated here: this kernel") and out.count("\n") == 1, err


def test_a_protection_that_does_not_hold_is_found(monkeypatch, tmp_path):
    """Whatever the kernel says it has done: a program tries what is forbidden, before the first one is run."""
    text, changed = module.INSIDE.read_text(), tmp_path / "inside.py"
    assert text.count("    filter_syscalls(allowed") == 1
    changed.write_text(text.replace("    filter_syscalls(allowed", "    allowed_syscalls(threads=True) or (allowed"))
    monkeypatch.setattr(module, "INSIDE", changed)
    with pytest.raises(module.SandboxUnavailable, match="they could start processes"):
        Sandbox().run("print(1)")


def test_as_an_ordinary_user(outside):
    """Where this is root: as another user, with an interpreter which that one can read. The files are that user's."""
    if os.geteuid() != 0:
        scratch, caught, missing = checked(start(TRY_ALL), outside, every=1)
    else:
        reachable = [path for path in (sys.executable, "/usr/bin/python3") if runs_as_another_user(path)]
        if not reachable:
            pytest.skip("no interpreter that another user can read")
        for path in (outside, *outside.iterdir()):
            os.chown(path, OTHER["user"], OTHER["group"])
        copy = Path(f"/var/tmp/grpo-kernels-copy-{os.getpid()}")
        shutil.copytree(REWARDS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            preamble = PREAMBLE.replace(str(REWARDS), str(copy))
            process = start(TRY_ALL, preamble, reachable[0], cwd="/", env={"TMPDIR": "/tmp"}, **OTHER)
            scratch, caught, missing = checked(process, outside, every=1)
        finally:
            shutil.rmtree(copy)
    assert bool(caught) == bool(missing) == bool(scratch)


OTHER = dict(user=12345, group=12345, extra_groups=[])


def runs_as_another_user(python):
    try:
        return subprocess.run([python, "-c", "import ctypes"], cwd="/", capture_output=True, **OTHER).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the kernel's header of x86-64")
def test_the_table_of_system_calls_is_the_kernels():
    header = next((p for p in Path("/usr/include").glob("**/asm/unistd_64.h")), None)
    if header is None:
        pytest.skip("no kernel headers here")
    numbers = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    from grpo_kernels.trainer.rewards import inside

    for entry in inside.SYSCALLS.replace("\n", " ").split(","):
        name, number, _ = entry.split()
        assert numbers[f"__NR_{name}"] == number
