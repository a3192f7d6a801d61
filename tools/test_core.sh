#!/bin/sh
# The core leg in two halves at once: much of each is waiting for programs that start, sleep and die.
# With arguments, those go to one pytest alone.
# Called by `make test-core` with the interpreter first.
set -u

python=$1
shift
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi

log=$(mktemp)
rest='faults compat gpu property unit house'
# shellcheck disable=SC2086  # words, each a folder
tools/run_pytest.sh "$python" rest $(printf 'tests/%s ' $rest) >"$log" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
tools/run_pytest.sh "$python" integration tests/integration
failed=$?
echo
echo "== the other half of the core leg: $rest"
wait "$other" || failed=1
cat "$log"
exit "$failed"
