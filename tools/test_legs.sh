#!/bin/sh
# Runs the test legs in three parallel lanes, then prints which legs ran, which did not, and why.
# Missing environments are built during the run.
#
#   three lanes    each takes the next part. Short ones come last, so that all lanes end together
#   in parallel    browser, Prometheus, environments
#
# Run one after the other, the legs would leave two cores mostly idle, because their tests wait for
# programs that start, sleep and die.
# Called by `make test`. Exits with 1 if any part failed. A skipped leg is not a failure.
set -u

make=${MAKE:-make}
parts="integration faults repo legacy vision others unit"
# Only in make test-all. A leg that cannot run here writes the reason to the file $SKIP_NOTE.
# The environments of these legs are built last, so their tests come last.
# On arm64 the Windows leg runs under box64. Beside other legs, its first 15 tests of 218 took 12
# minutes there, so it is left to `make test-windows`.
late="remote windows ray formats"
[ "$(uname -m)" != aarch64 ] || late="remote ray formats"
[ -z "${SLOW:-}" ] || parts="python314 $parts $late"
notes=$(mktemp -d)
: >"$notes/summary"
if [ -n "${SLOW:-}" ] && [ "$(uname -m)" = aarch64 ]; then
    echo "  windows: skipped (too slow under box64 on arm64; run make test-windows)" \
        >"$notes/summary"
fi

# run_lane: runs parts until none is left. mkdir fails if another lane has taken the part.
run_lane() {
    for part in $parts; do
        if mkdir "$notes/taken-$part" 2>/dev/null; then run_part "$part"; fi
    done
}

# run_part PART: waits for its environment (see below), runs it and records the outcome.
run_part() {
    case $1 in
    vision | legacy | remote | windows | ray | formats) name=$1 env_log=$notes/env-$1 ;;
    python314) name=$1 env_log=/dev/null ;;
    *) name="core: $1" env_log=/dev/null ;;
    esac
    if [ "$1" = legacy ] && ! "$has_legacy"; then
        echo "  legacy: skipped (no working Python 3.10 found; torch 1.13.1 needs it)" \
            >>"$notes/summary"
        return
    fi
    echo
    echo "== $name"
    while [ ! -e "$env_log" ] && kill -0 "$setup" 2>/dev/null; do sleep 1; done
    [ ! -e "$env_log" ] || cat "$env_log"
    start_s=$(date +%s)
    note=$notes/skipped-$1
    if SKIP_NOTE=$note "$make" --no-print-directory "test-$1"; then outcome=passed; else outcome=FAILED; fi
    outcome="$outcome ($(($(date +%s) - start_s)) s)"
    [ ! -s "$note" ] || outcome="skipped ($(cat "$note"))"
    echo "  $name: $outcome" >>"$notes/summary"
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
# leave most of the cores free. The browser comes first, because tests of the first part need it.
{
    tools/install_programs.sh
    if "$has_legacy"; then prepare legacy; fi
    prepare vision
    [ -z "${SLOW:-}" ] || for leg in $late; do prepare "$leg"; done
} &
setup=$!
trap 'kill "$setup" 2>/dev/null; rm -rf "$notes"' EXIT
trap 'exit 130' INT TERM
"$make" --no-print-directory env-core || exit 1

run_lane >"$notes/second-lane" 2>&1 &
second=$!
run_lane >"$notes/third-lane" 2>&1 &
third=$!
trap 'kill "$setup" "$second" "$third" 2>/dev/null; rm -rf "$notes"' EXIT
run_lane
wait "$second" "$third"
for lane in second third; do
    echo
    echo "== Output of the $lane lane"
    cat "$notes/$lane-lane"
done
echo
echo "== Test legs"
cat "$notes/summary"
! grep -q ': FAILED' "$notes/summary"
