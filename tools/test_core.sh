#!/bin/sh
# Runs the core leg in two parallel halves, because much of each is waiting for programs that start,
# sleep and die. Arguments are passed to a single pytest instead.
# Called by `make test-core`, with the interpreter first. `make test` runs the halves in its lanes.
set -u

python=$1
shift
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi

make=${MAKE:-make}
log=$(mktemp)
"$make" --no-print-directory --keep-going test-faults test-repo test-others test-unit >"$log" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
"$make" --no-print-directory test-integration
failed=$?
echo
echo "== Output of the other half of the core leg"
wait "$other" || failed=1
cat "$log"
exit "$failed"
