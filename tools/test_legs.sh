#!/bin/sh
# Runs the test legs in two lanes at once, then says which ran, which did not, and why. Environments
# that are not there yet are built on the way.
#
#   first lane     core: integration  ------->  legacy
#   second lane    core: all others   ------->  vision
#   beside them    browser, environments
#
# One after the other the legs leave much of two cores idle: their tests wait for programs that start,
# sleep and die.
# Called by `make test`; exits with 1 if any part failed. A leg that was skipped is no failure.
set -u

make=${MAKE:-make}
notes=$(mktemp -d)
: >"$notes/summary"

# run_part NAME TARGET: runs one make target and notes how it went.
run_part() {
    echo
    echo "== $1"
    start_s=$(date +%s)
    if "$make" --no-print-directory "$2"; then outcome=passed; else outcome=FAILED; fi
    echo "  $1: $outcome ($(($(date +%s) - start_s)) s)" >>"$notes/summary"
}

# run_leg LEG: waits until its environment has been built below, and runs it.
run_leg() {
    while [ ! -e "$notes/env-$1" ] && kill -0 "$setup" 2>/dev/null; do sleep 1; done
    [ ! -e "$notes/env-$1" ] || cat "$notes/env-$1"
    run_part "$1" "test-$1"
}

# prepare LEG: builds its environment; the log gets its name at the end, when others may read it.
prepare() {
    "$make" --no-print-directory "env-$1" >"$notes/building" 2>&1
    mv "$notes/building" "$notes/env-$1"
}

has_legacy=false
if [ -e .venv-legacy/.ready ] || [ -n "$(tools/find_python.sh 3.10)" ]; then
    has_legacy=true
fi

# The other environments are built beside the first and beside its tests: downloads leave most of the
# cores free. First comes the browser, which tests in the middle of the first lane use.
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
    echo "  legacy: skipped (no Python 3.10 that starts was found; torch 1.13.1 needs it)" \
        >>"$notes/summary"
fi

wait "$lane"
echo
echo "== The second lane, which ran meanwhile"
cat "$notes/second-lane"
echo
echo "== Test legs"
cat "$notes/summary"
! grep -q ': FAILED' "$notes/summary"
