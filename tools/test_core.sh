#!/bin/sh
# The core leg in two halves at once: much of each is waiting for programs that start, sleep and die.
# With arguments, those go to one pytest alone.
# Called by `make test-core` with the interpreter first; `make test` runs the halves in its lanes.
set -u

python=$1
shift
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi

make=${MAKE:-make}
log=$(mktemp)
"$make" --no-print-directory test-others >"$log" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
"$make" --no-print-directory test-integration
failed=$?
echo
echo "== the other half of the core leg"
wait "$other" || failed=1
cat "$log"
exit "$failed"
