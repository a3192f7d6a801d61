#!/bin/sh
# Runs the python314 leg: the tests that depend on the version of Python, with CPython 3.14.
#
#   tools/python314_leg.sh test [PYTEST ARGUMENTS]
#   tools/python314_leg.sh python ARGUMENTS...
#
# A Python 3.14 on this machine is used with the newest torch of the package index. Without one, Debian
# has both: build/python314/tree gets the packages of Debian's next release, unpacked and not
# installed, and its interpreter is patched to find its libraries there. That needs root and apt, and
# downloads 210 MB on first use. The packages stay in build/python314.
set -eu

SUITE=forky
env_dir=.venv-314
state=$PWD/build/python314
tree=$state/tree
# What the version of Python can break: start methods, forks, annotations, pickling, reference counts,
# the interpreter's own modules.
SELECTION="tests/unit tests/integration/test_loader.py tests/integration/cli/test_run.py
    tests/integration/engine/parent tests/integration/engine/pickling
    tests/faults/engine/parent/test_clean_process.py tests/faults/engine/parent/test_fork_server.py
    tests/faults/engine/worker"

skip() {
    echo "python314: skipped ($1)"
    [ -z "${SKIP_NOTE:-}" ] || echo "$1" >"$SKIP_NOTE" # for the summary of make test-all
    exit 0
}

check_machine() {
    [ "$(uname -s)" = Linux ] || skip "needs Python 3.14, or Linux to unpack Debian's"
    [ "$(id -u)" = 0 ] || skip "needs Python 3.14, or root to unpack Debian's"
    command -v apt-get >/dev/null || skip "needs Python 3.14, or apt to unpack Debian's"
    [ -n "$(tools/windows_leg.sh mirror)" ] || skip "needs Python 3.14, or a Debian mirror in apt"
}

# unpack_python: builds $tree.
unpack_python() {
    architecture=$(dpkg --print-architecture)
    apt="$state/apt $SUITE $architecture"
    echo "python314: building build/python314; this downloads 210 MB and takes minutes"
    rm -rf "$tree"
    mkdir -p "$tree"
    tools/private_apt.sh $apt apt-get -qq update
    tools/private_apt.sh $apt apt-get -qq install --yes --no-install-recommends --download-only \
        python3.14 python3-torch libstdc++6 >/dev/null
    for package in "$state"/apt/cache/archives/*.deb; do dpkg -x "$package" "$tree"; done
    # Debian 12's patchelf. Newer versions leave an interpreter that crashes.
    patchelf=$state/patchelf/usr/bin/patchelf
    apt="$state/apt-patchelf bookworm $architecture"
    tools/private_apt.sh $apt apt-get -qq update
    tools/private_apt.sh $apt sh -c "cd '$state/apt-patchelf/cache/archives' && apt-get -qq download patchelf"
    dpkg -x "$state"/apt-patchelf/cache/archives/patchelf_*.deb "$state/patchelf"
    libraries=$tree/usr/lib/$(uname -m)-linux-gnu
    "$patchelf" --set-interpreter "$(echo "$libraries"/ld-linux-*.so.*)" --force-rpath \
        --set-rpath "$libraries:$libraries/blas:$libraries/lapack:$tree/usr/lib" \
        "$tree/usr/bin/python3.14"
    # A library with a path of its own would not use the interpreter's.
    "$patchelf" --remove-rpath "$tree"/usr/lib/python3/dist-packages/torch/_C.*.so
}

# make_env: makes $env_dir from Debian's Python. Its torch and NumPy stay Debian's.
make_env() {
    [ -e "$tree/usr/bin/python3.14" ] || unpack_python
    rm -rf "$env_dir"
    "$tree/usr/bin/python3.14" -m venv --without-pip --system-site-packages "$env_dir"
    # pip of Python 3.11 warns about its own code under 3.14.
    export PYTHONWARNINGS=ignore::SyntaxWarning
    .venv/bin/python -m pip --python "$env_dir/bin/python" install -qq --disable-pip-version-check \
        --no-input --no-compile --constraint constraints/python314.txt \
        --requirement requirements/build.txt --requirement requirements/python314.txt
    .venv/bin/python -m pip --python "$env_dir/bin/python" install -qq --disable-pip-version-check \
        --no-input --no-deps --no-build-isolation --editable .
    unset PYTHONWARNINGS
}

# prepare: builds the environment if there is none, or if its scripts and lists have changed since.
prepare() {
    stamp=$(cat "$0" pyproject.toml requirements/build.txt requirements/test.txt \
        requirements/python314.txt constraints/python314.txt | cksum)
    [ "$(cat "$env_dir/.ready" 2>/dev/null)" != "$stamp" ] || return 0
    start_s=$(date +%s)
    if [ -n "$(tools/find_python.sh 3.14)" ]; then
        rm -f "$env_dir/.ready"
        tools/make_env.sh python314 "$env_dir" 3.14
    else
        check_machine
        make_env
        echo "python314: $env_dir is ready after $(($(date +%s) - start_s)) s"
    fi
    echo "$stamp" >"$env_dir/.ready"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
test)
    prepare
    "$env_dir/bin/python" -c 'import sys, torch; print("python314:", sys.version, "torch", torch.__version__)'
    [ $# -gt 0 ] || set -- -m "not soak and not slow" $SELECTION
    exec "$env_dir/bin/python" tools/run_pytest.py python314 "$@"
    ;;
python)
    prepare
    exec "$env_dir/bin/python" "$@"
    ;;
*)
    echo "usage: tools/python314_leg.sh test|python ARGUMENTS..." >&2
    exit 2
    ;;
esac
