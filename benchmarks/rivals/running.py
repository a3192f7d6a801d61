"""Runs the turns: one process each, with a time limit and clean-up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_turn(
    python: str, orders: list[dict[str, Any]], limit_s: float, source: Path | None
) -> list[dict[str, Any]]:
    """Run one contender. Returns one answer per order, even if the process fails.

    Args:
        source: Path of Penstock's sources, visible only to Penstock's own turns.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as folder:
        file, said = Path(folder, "orders.json"), Path(folder, "said")
        file.write_text(json.dumps(orders), "utf-8")
        script = Path(folder, "go.py")
        script.write_text(_script(f"turn.main(json.load(open({str(file)!r})))"), "utf-8")
        with said.open("wb") as output:  # not a pipe, which a hung worker would keep open
            process = subprocess.Popen(
                [python, str(script)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**_environment(source), "TMPDIR": folder},
                start_new_session=True,
            )
            ending = _wait(process, limit_s)
        text = said.read_text("utf-8", "replace")
    return _answers(text, len(orders), ending)


class Session:
    """One process for all turns of a contender, where importing torch takes seconds."""

    def __init__(self, python: str, source: Path | None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-peers-")
        script = Path(self.folder.name, "go.py")
        script.write_text(_script("turn.serve()"), "utf-8")
        self.process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self.folder.name,
            env={**_environment(source), "TMPDIR": self.folder.name},
            start_new_session=True,
        )

    def run(self, orders: list[dict[str, Any]], limit_s: float) -> list[dict[str, Any]]:
        """Run one turn. Ends the process if it takes longer than ``limit_s``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        alarm = threading.Timer(limit_s, _end_group, [self.process.pid])
        alarm.start()
        lines = []
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(orders) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                lines += [line] if "ANSWER {" in line else []
                if len(lines) == len(orders):
                    break
        alarm.cancel()
        return _answers("".join(lines), len(orders), "the process has ended")

    def end(self) -> None:
        _end_group(self.process.pid)
        self.process.wait()
        self.folder.cleanup()


def _environment(source: Path | None) -> dict[str, str]:
    """Return the environment of a turn, in which modules are compiled only once."""
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept if source is None else {**kept, "PYTHONPATH": str(source)}


def _script(call: str) -> str:
    """Write a main module with a guard, because spawned workers import it again."""
    return (
        "import sys\n"
        f"sys.path[:] = [p for p in sys.path[1:]] + [{str(HERE)!r}]\n"
        "if __name__ == '__main__':\n"
        "    import json, turn\n"
        f"    {call}\n"
    )


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"hangs (ended after {limit_s:.0f} s)"
    finally:
        _end_group(process.pid)
        process.wait()
    return "" if status == 0 else f"the process ended with status {status}:"


def _end_group(leader: int) -> None:
    """End the process and its workers.

    Sends SIGTERM first. Python's resource tracker survives it and removes their shared memory.
    """
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)
        for _ in range(20):
            time.sleep(0.05)
            os.killpg(leader, 0)  # raises when no process is left
        os.killpg(leader, signal.SIGKILL)


def _answers(text: str, count: int, ending: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("ANSWER ") for line in text.splitlines() if "ANSWER {" in line]
    found = [json.loads(line[line.index("{") :]) for line in lines]
    if os.environ.get("PENSTOCK_PEERS_DEBUG") and len(found) < count:
        print(text[-4000:])
    last = [line.strip() for line in text.splitlines() if line.strip()][-1:]
    reason = " ".join([ending, *(last if ending.startswith("the process") else [])])
    return found + [{"failed": re.sub(r"/\S+/", "", reason)[:160]}] * (count - len(found))
