"""``python -m support.programs --minutes N --seed S``: run random programs, print differences."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from support.programs import driver, record

TEMPLATE = '''"""{problem}"""

import sys

from support.programs.driver import Session
from support.programs.record import Program

session = Session(0)
problems = session.check({program!r})
session.close()
print("\\n".join(problems))
sys.exit(bool(problems))
'''


def main() -> int:
    parser = argparse.ArgumentParser(prog="programs")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-spawn", action="store_true", help="workers that start in seconds")
    parser.add_argument("--found", type=Path, help="a folder that gets a script for each failure")
    parser.add_argument("--results", type=Path, help="a file that gets the summary")
    parser.add_argument("--one", help="check this program, as it was printed")
    parser.add_argument("--serve", type=float, metavar="LIMIT_S", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        driver.serve(given.serve)
        return 0
    session = driver.Session(given.seed)
    if given.one:
        problems = session.check(record.parse(given.one))
        session.close()
        print("\n".join(problems) or "nothing differs")
        return bool(problems)
    if given.minutes is None and given.count is None:
        parser.error("--minutes or --count")
    for found in session.run(
        count=given.count, minutes=given.minutes, allows_spawn=not given.no_spawn
    ):
        print(found, flush=True)
        if given.found:
            given.found.mkdir(parents=True, exist_ok=True)
            path = given.found / f"{given.seed}-{found.number}.py"
            text = TEMPLATE.format(problem=found.problems[0][:300], program=found.smallest)
            path.write_text(text, encoding="utf-8")
    print(session.report, flush=True)
    if given.results:
        with given.results.open("a", encoding="utf-8") as file:
            file.write(f"{session.report}\n")
    return bool(session.report.found)


if __name__ == "__main__":
    sys.exit(main())
