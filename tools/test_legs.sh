#!/bin/sh
# Runs the test legs in two parallel lanes, then prints which legs ran, which did not, and why. Missing
# environments are built during the run.
#
#   first lane     core: integration  ------->  legacy
#   second lane    core: all others   ------->  vision
#   in parallel    browser, environments
#
# Run one after the other, the legs would leave two cores mostly idle, because their tests wait for
# programs that start, sleep and die.
# Called by `make test`. Exits with 1 if any part failed. A skipped leg is not a failure.
set -u

make=${MAKE:-make}
notes=$(mktemp -d)
: >"$notes/summary"

# run_part NAME TARGET: runs one make target and records the outcome.
run_part() {
    echo
    echo "== $1"
    start_s=$(date +%s)
    if "$make" --no-print-directory "$2"; then outcome=passed; else outcome=FAILED; fi
    echo "  $1: $outcome ($(($(date +%s) - start_s)) s)" >>"$notes/summary"
}

# run_leg LEG: waits until its environment is built (see below), then runs it.
run_leg() {
    while [ ! -e "$notes/env-$1" ] && kill -0 "$setup" 2>/dev/null; do sleep 1; done
    [ ! -e "$notes/env-$1" ] || cat "$notes/env-$1"
    run_part "$1" "test-$1"
}

# prepare LEG: builds its environment. The log gets its final name at the end, when it is complete.
prepare() {
    "$make" --no-print-directory "env-$1" >"$notes/building" 2>&1
    mv "$notes/building" "$notes/env-$1"
}

has_legacy=false
if [ -e .venv-legacy/.ready ] || [ -n "$(tools/find_python.sh 3.10)" ]; then
    has_legacy=true
fi

# The other environments are built in parallel with the first one and its tests, because downloads
# leave most of the cores free. The browser comes first, because tests of the first lane need it.
{
    tools/install_browser.sh
    prepare vision
    if "$has_legacy"; then prepare legacy; fi
} &
setup=$!
trap 'kill "$setup" 2>/dev/null; rm -rf "$notes"' EXIT
trap 'exit 130' INT TERM
"$make" --no-print-directory env-core || exit 1

{
    run_part "core: all others" test-others
    run_leg vision
} >"$notes/second-lane" 2>&1 &
lane=$!
trap 'kill "$setup" "$lane" 2>/dev/null; rm -rf "$notes"' EXIT

run_part "core: integration" test-integration
if "$has_legacy"; then
    run_leg legacy
else
    echo "  legacy: skipped (no working Python 3.10 found; torch 1.13.1 needs it)" \
        >>"$notes/summary"
fi

wait "$lane"
echo
echo "== Output of the second lane"
cat "$notes/second-lane"
echo
echo "== Test legs"
cat "$notes/summary"
! grep -q ': FAILED' "$notes/summary"
