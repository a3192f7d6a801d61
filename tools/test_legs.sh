#!/bin/sh
# Runs the test legs one after the other, then says which ran, which did not, and why. Environments
# that are not there yet are built on the way.
# Called by `make test`; exits with 1 if any leg failed. A leg that was skipped is no failure.
set -u

make=${MAKE:-make}
summary='' failed=0

note() {
    summary="$summary
  $1"
}

# run_leg LEG: sets up and tests one leg by its make targets, and notes how it went.
run_leg() {
    echo
    echo "== $1 leg"
    start_s=$(date +%s)
    if ! "$make" --no-print-directory "env-$1"; then
        note "$1: FAILED (its environment could not be built)"
        failed=1
        return
    fi
    ready_s=$(date +%s)
    if "$make" --no-print-directory "test-$1"; then
        outcome=passed
    else
        outcome=FAILED
        failed=1
    fi
    note "$1: $outcome (set-up $((ready_s - start_s)) s, tests $(($(date +%s) - ready_s)) s)"
}

# The other environments are built while the core leg runs: downloads leave most of the cores free.
# First comes the browser, which tests in the middle of that leg use.
"$make" --no-print-directory env-core || exit 1
has_legacy=false
if [ -e .venv-legacy/.ready ] || [ -n "$(tools/find_python.sh 3.10)" ]; then
    has_legacy=true
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{
    tools/install_browser.sh
    "$make" --no-print-directory env-vision
    if "$has_legacy"; then "$make" --no-print-directory env-legacy; fi
} >"$log" 2>&1 &
setup=$!

run_leg core
wait "$setup"
cat "$log"
run_leg vision
if "$has_legacy"; then
    run_leg legacy
else
    note "legacy: skipped (no Python 3.10 that starts was found; torch 1.13.1 needs it)"
fi

echo
echo "== Test legs$summary"
exit "$failed"
