"""Workers of a forked fork server run nothing of the user's process and hold none of its files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support import leftovers, scripts

pytestmark = [
    pytest.mark.fault,
    pytest.mark.legacy,
    pytest.mark.skipif("COVERAGE_PROCESS_START" in os.environ, reason="the process is traced"),
]

PROGRAM = """
import atexit, contextvars, faulthandler, gc, json, logging, os, signal, sys, tempfile, threading
import weakref
from pathlib import Path

import numpy as np
import torch

import penstock
import settings
from penstock.engine.parent import fork_server

OWNER = os.getpid()
LEFT = Path("left.txt")


def tell(what):
    with LEFT.open("a") as file:
        file.write(f"{what} {'owner' if os.getpid() == OWNER else 'another process'}\\n")


class Released:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        tell(f"__del__ of {self.name}")

    def at_exit(self):
        tell(f"{self.name} at exit")


class Thing:
    pass


class Dataset:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5:  # the worker's own handler
            atexit.register(lambda: Path("worker_exit.txt").write_text("ran"))
        return json.dumps(look())


class Looks(Dataset):
    pass


def look():
    import logging, os, signal, sys, threading
    from multiprocessing import active_children

    import settings

    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    context = {variable.name for variable in __import__("contextvars").copy_context()}
    return {
        "pid": os.getpid(),
        "links": links,
        "term": int(signal.getsignal(signal.SIGTERM)),
        "usr1": int(signal.getsignal(signal.SIGUSR1)),
        "trace": str(sys.gettrace()),
        "wakeup": signal.set_wakeup_fd(-1),
        "recursion": sys.getrecursionlimit(),
        "setting": settings.VALUE,
        "folder": os.getcwd(),
        "variable": os.environ.get("MY_VARIABLE"),
        "children": len(active_children()),
        "grad": __import__("torch").is_grad_enabled(),
        "threads": len(os.listdir("/proc/self/task")),
        "context": sorted(context),
        "main": [name for name in vars(sys.modules["__main__"]) if name == "OWNER"],
        "handlers": [type(one).__name__ for one in logging.getLogger("mine").handlers],
        "own_threads": __import__("torch").get_num_threads(),
        "callbacks": [callback(3) for callback in make_callbacks()] == [6] * 500,
    }


def make_callbacks():
    # With this many callbacks, libffi maps its own file a second time.
    import ctypes

    return [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: 2 * x) for _ in range(500)]


def go():
    variable = contextvars.ContextVar("mine_variable")
    variable.set(3)
    sys.stdout.write("written once|")
    user_file = logging.FileHandler("log.txt")
    logging.getLogger("mine").addHandler(user_file)
    user_file.stream.write("logged once|")  # stays in the buffer
    folder = tempfile.TemporaryDirectory(dir=".")
    cycle = Released("cycle")
    cycle.itself = cycle
    del cycle
    thing = Thing()
    weakref.finalize(thing, tell, "finalizer")
    atexit.register(Released("a bound method").at_exit)
    atexit.register(tell, "atexit")
    signal.signal(signal.SIGTERM, lambda *_: tell("SIGTERM"))
    signal.signal(signal.SIGUSR1, lambda *_: tell("SIGUSR1"))
    faulthandler.register(signal.SIGUSR2)
    library = next(line.split()[-1] for line in open("/proc/self/maps") if ".so" in line)
    os.open(library, os.O_RDONLY)
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        os.set_inheritable(fd, True)
    os.environ["MY_VARIABLE"] = "before"
    settings.VALUE = "changed"
    seen = []
    try:
        with torch.no_grad():
            loader = penstock.DataLoader(Looks(), batch_size=None, num_workers=2)
        os.environ["MY_VARIABLE"] = "after"
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        global LEFT
        LEFT = Path("..") / LEFT
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        torch.rand(1 << 22).sum()  # starts OpenMP's threads here
        for number, sample in enumerate(loader):
            seen.append(json.loads(sample))
            if number == 2:
                os.kill(seen[0]["pid"], signal.SIGTERM)
        server = fork_server.current_fork_server()
        why, pid = server.why_fresh, server.pid
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        del loader
        for _ in range(3):
            gc.collect(0)
        assert len([*penstock.DataLoader(Looks(), batch_size=None, num_workers=1)]) == 12
        tell("before the end")
    finally:
        tell("finally")
    pipe = os.readlink(f"/proc/self/fd/{read_end}")
    stop.set()
    exists = os.path.isdir(os.path.join("..", folder.name))
    found = {"why": why, "seen": seen, "pipe": pipe, "links": links, "exists": exists}
    print(json.dumps({**found, "library": library}))


go()
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Any]:
    folder = tmp_path_factory.mktemp("detached")
    (folder / "settings.py").write_text("VALUE = 'as imported'\n")
    result = scripts.run(PROGRAM, folder)
    assert result.returncode == 0, result.stderr
    first, _, rest = result.stdout.partition("|")
    assert first == "written once"
    return json.loads(rest), folder, result


def test_the_fork_server_was_forked(ended: Any) -> None:
    assert ended[0]["why"] is None
    assert len(ended[0]["seen"]) == 12


def test_only_the_user_s_process_runs_its_own_handlers(ended: Any) -> None:
    lines = (ended[1] / "left.txt").read_text().splitlines()
    assert not [line for line in lines if line.endswith("another process")]
    assert sorted(lines) == sorted(
        f"{what} owner"
        for what in (
            "before the end",
            "finally",
            "__del__ of cycle",
            "__del__ of a bound method",
            "a bound method at exit",
            "atexit",
            "finalizer",
        )
    )


def test_a_worker_runs_the_exit_handlers_that_it_registered(ended: Any) -> None:
    assert (ended[1] / "elsewhere" / "worker_exit.txt").read_text() == "ran"


def test_text_in_buffers_is_written_once(ended: Any) -> None:
    assert ended[2].stdout.count("written once") == 1
    assert (ended[1] / "log.txt").read_text() == "logged once|"


def test_temporary_files_of_the_user_stay(ended: Any) -> None:
    assert ended[0]["exists"]


def test_no_process_of_ours_holds_the_user_s_files_and_pipes(ended: Any) -> None:
    told = ended[0]
    for links in (told["links"], *(seen["links"] for seen in told["seen"])):
        assert told["pipe"] not in links
        assert not [link for link in links if link.endswith("log.txt")]


def test_a_library_that_a_library_opened_stays_open(ended: Any) -> None:
    told = ended[0]
    for links in (told["links"], *(seen["links"] for seen in told["seen"])):
        assert told["library"] in links


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("term", 0),
        ("usr1", 0),
        ("trace", "None"),
        ("wakeup", -1),
        ("children", 0),
        ("grad", True),
        ("threads", 1),
        ("context", []),
        ("main", []),
        ("handlers", []),
        ("own_threads", 1),
        ("variable", "after"),
        ("setting", "changed"),
        ("callbacks", True),
    ],
)
def test_a_worker_sees(name: str, value: Any, ended: Any) -> None:
    assert {json.dumps(seen[name]) for seen in ended[0]["seen"]} == {json.dumps(value)}


def test_a_worker_runs_in_the_folder_of_its_loader(ended: Any) -> None:
    assert {Path(seen["folder"]).name for seen in ended[0]["seen"]} == {"elsewhere"}


def test_the_user_s_deep_stack_leaves_room_for_recursion(ended: Any) -> None:
    assert {seen["recursion"] > 1000 for seen in ended[0]["seen"]} == {True}


LOSSES = """
import os, signal, sys, time
import penstock
from penstock.engine.parent import fork_server

fork_server.STOPPED_LIMIT_S = 1.0
EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7]]


def load():
    return [batch.tolist() for batch in penstock.DataLoader(range(8), batch_size=4, num_workers=2)]


def begin():
    fork_server.close_fork_server()
    loader = penstock.DataLoader(range(8), batch_size=4, num_workers=2)
    server = fork_server.current_fork_server()
    assert server.why_fresh is None, server.why_fresh
    return loader, server.pid


for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
    loader, pid = begin()
    os.kill(pid, number)
    assert [batch.tolist() for batch in loader] == EXPECTED
    pid = fork_server.current_fork_server().pid
    os.kill(pid, number)
    assert load() == EXPECTED
loader, pid = begin()
batches = iter(loader)
first = next(batches).tolist()
os.kill(pid, signal.SIGKILL)
assert [first, *(batch.tolist() for batch in batches)] == EXPECTED
print("done", pid)
"""


def test_a_forked_server_that_is_killed_or_stopped_is_replaced(tmp_path: Path) -> None:
    result = scripts.run(LOSSES, tmp_path)
    assert result.stdout.startswith("done"), result.stderr


def test_a_program_that_is_killed_leaves_no_forked_server(tmp_path: Path) -> None:
    with scripts.running(KILLED, tmp_path) as process:
        scripts.read_line(process, "ready")
        family = scripts.family_of(process.pid)
        assert len(family) == 3  # the fork server and two workers
        process.kill()
        process.wait()
        assert leftovers.wait_until_gone(family) == []


KILLED = """
import time
import penstock
from penstock.engine.parent import fork_server
batches = iter(penstock.DataLoader(range(800), batch_size=4, num_workers=2))
next(batches)
assert fork_server.current_fork_server().why_fresh is None
print("ready", flush=True)
time.sleep(600)
"""


def test_a_ctrl_c_during_the_start_reaches_only_the_user_s_code(tmp_path: Path) -> None:
    with scripts.running(INTERRUPTED, tmp_path) as process:  # in a process group of its own
        output, errors = process.communicate(timeout=240)
    assert errors == ""
    assert output == "interrupted\n"


INTERRUPTED = """
import os, signal, sys
import penstock
from penstock.engine.parent import fork_server

PID = os.getpid()


def report(unraisable):
    # Python cannot raise a Ctrl-C that comes in a weakref callback here, and prints it.
    if os.getpid() != PID or unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


sys.unraisablehook = report
signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGINT))
num_interrupted = len([*penstock.DataLoader(range(8), batch_size=4, num_workers=2)]) - 2
for number in range(40):
    fork_server.close_fork_server()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 * (number + 1))
        loader = penstock.DataLoader(range(8), batch_size=4, num_workers=2)
        for _ in loader:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        num_interrupted += 1
loader = batches = None
assert len([*penstock.DataLoader(range(8), batch_size=4, num_workers=2)]) == 2
fork_server.close_fork_server()
print("interrupted" if num_interrupted else "never interrupted")
"""


LIMITED = """
import os, resource
from penstock import DataLoader

os.dup2(0, 100, inheritable=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
loader = DataLoader(range(16), 8, num_workers=2)
print(len(list(loader)), "a copy of this process" in str(loader.plan))
"""


def test_descriptors_above_the_limit_are_closed(tmp_path: Path) -> None:
    done = scripts.run(LIMITED, tmp_path)
    assert (done.stdout, done.stderr) == ("2 True\n", "")
