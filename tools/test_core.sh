#!/bin/sh
# The core leg in two halves at once: much of each is waiting for programs that start, sleep and die.
# With arguments, those go to one pytest alone.
# Called by `make test-core` with the interpreter first.
set -u

python=$1
shift
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi

log=$(mktemp)
tools/run_pytest.sh "$python" faults tests/faults tests/compat tests/gpu tests/property >"$log" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
tools/run_pytest.sh "$python" core tests/unit tests/integration tests/house
failed=$?
echo
echo "== the other half of the core leg: faults, compat, gpu, property"
wait "$other" || failed=1
cat "$log"
exit "$failed"
