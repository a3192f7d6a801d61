#!/bin/sh
# Runs the core leg with coverage of src, including child processes: workers, fork servers, and
# programs that tests start. Arguments are passed to pytest.
# Called by `make coverage`, with the interpreter first. Writes build/coverage/ (HTML) and prints a table.
set -eu

python=$1
shift
root=$(pwd)
mkdir -p build/coverage
rm -f build/coverage/.coverage*

# Every Python process imports sitecustomize.py from this folder. It starts coverage if the variable
# names a configuration.
export COVERAGE_PROCESS_START="$root/pyproject.toml" COVERAGE_FILE="$root/build/coverage/.coverage"
export PYTHONPATH="$root/tools/measured:$root/src${PYTHONPATH:+:$PYTHONPATH}"
status=0
if [ $# -eq 0 ]; then set -- tests; fi
"$python" -m pytest "$@" || status=$?
# Killed processes can leave incomplete files, which are skipped.
"$python" -W ignore -m coverage combine --quiet build/coverage || true
rm -f build/coverage/.coverage.*
"$python" -m coverage html --quiet -d build/coverage/html
"$python" -m coverage report --sort=cover | tail -n 60
exit "$status"
