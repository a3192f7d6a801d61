#!/bin/sh
# The core leg with coverage of src, children included: workers, nurseries, forked and spawned ones,
# programs that tests start. With arguments, those go to pytest.
# Called by `make coverage` with the interpreter first. Writes build/coverage/ (HTML) and prints a table.
set -eu

python=$1
shift
root=$(pwd)
mkdir -p build/coverage
rm -f build/coverage/.coverage*

# Each Python that starts reads this folder's sitecustomize.py, which begins to measure where the
# variable names a configuration.
export COVERAGE_PROCESS_START="$root/pyproject.toml" COVERAGE_FILE="$root/build/coverage/.coverage"
export PYTHONPATH="$root/tools/measured:$root/src${PYTHONPATH:+:$PYTHONPATH}"
status=0
if [ $# -eq 0 ]; then set -- tests; fi
"$python" -m pytest "$@" || status=$?
# A process that was killed may leave half a file: those are passed over.
"$python" -W ignore -m coverage combine --quiet build/coverage || true
rm -f build/coverage/.coverage.*
"$python" -m coverage html --quiet -d build/coverage/html
"$python" -m coverage report --sort=cover | tail -n 60
exit "$status"
