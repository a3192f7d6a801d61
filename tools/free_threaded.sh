#!/bin/sh
# Builds a free-threaded CPython 3.13 from Debian's source package in build/free-threaded, and runs the
# tests of counters, randomness and threads with it. Outside of make test-all: the build takes 10
# minutes on two cores, and needs a C compiler and apt.
#
#   tools/free_threaded.sh [PYTEST ARGUMENTS]
#
# Debian has no free-threaded interpreter. Its mirrors need not have the source of the newest version.
# torch 2.8.0 is the newest one with a small wheel for this interpreter on arm64.
set -eu

SUITE=forky
state=$PWD/build/free-threaded
python=$state/env/bin/python
TESTS="tests/unit/order tests/unit/device tests/unit/machine tests/unit/engine/memory
    tests/integration/engine/parent/test_thread_pool.py
    tests/integration/engine/parent/test_free_threads.py"

# build_python: configures, compiles and installs to $state/python.
build_python() {
    command -v gcc >/dev/null || { echo "free-threaded: needs gcc" >&2; exit 1; }
    mkdir -p "$state/source"
    architecture=$(dpkg --print-architecture)
    TYPES=deb-src tools/private_apt.sh "$state/apt" $SUITE "$architecture" apt-get -qq update
    TYPES=deb-src tools/private_apt.sh "$state/apt" $SUITE "$architecture" \
        sh -c "cd '$state' && apt-get -qq source --download-only python3.13"
    tar -xf "$state"/python3.13_*.orig.tar.xz -C "$state/source" --strip-components=1
    (
        cd "$state/source"
        ./configure -q --disable-gil --disable-test-modules --prefix="$state/python" CFLAGS=-O1
        make -s -j2
        make -s install
    ) >"$state/build.log" 2>&1 || { tail -n 20 "$state/build.log" >&2; exit 1; }
}

if [ ! -x "$python" ]; then
    [ -x "$state/python/bin/python3.13t" ] || build_python
    "$state/python/bin/python3.13t" -m venv "$state/env"
    "$python" -m pip install -qq --disable-pip-version-check --no-input --no-compile \
        torch==2.8.0 numpy==2.4.6 psutil==7.2.2 cloudpickle rich pytest pytest-timeout
fi
[ $# -gt 0 ] || set -- $TESTS
export PYTHONPATH="$PWD/src"
"$python" -c 'import sys; print("free-threaded:", sys.version)'
exec "$python" tools/run_pytest.py free-threaded "$@"
