#!/bin/sh
# Builds or refreshes the environment of one test leg.
#
#   tools/make_env.sh LEG ENV_DIR PYTHON_VERSION...
#
# LEG names requirements/LEG.txt and constraints/LEG.txt. The versions are passed to find_python.sh.
# All packages are resolved in one pip command with the constraints, so nothing can change the version
# of torch. On success, ENV_DIR/.ready is written. An environment without it is incomplete and is
# built again.
set -eu

leg=$1 env_dir=$2
shift 2

# -qq hides pip's progress and warnings, but not its errors. --no-compile: no bytecode for thousands
# of torch's files that no test imports.
pip_install() {
    "$env_dir/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-compile \
        --prefer-binary --constraint "constraints/$leg.txt" "$@"
}

start_s=$(date +%s)
if [ ! -e "$env_dir/.ready" ]; then
    python=$("$(dirname "$0")/find_python.sh" "$@")
    if [ -z "$python" ]; then
        echo "$leg: no working Python found (wanted: $*)" >&2
        exit 1
    fi
    echo "$leg: building $env_dir with $python; this downloads torch and can take minutes"
    rm -rf "$env_dir"
    "$python" -m venv "$env_dir"
else
    echo "$leg: refreshing $env_dir"
fi

pip_install --requirement requirements/build.txt
pip_install --requirement "requirements/$leg.txt" --no-build-isolation --editable .
"$env_dir/bin/python" -m pip --disable-pip-version-check check
touch "$env_dir/.ready"
echo "$leg: $env_dir is ready after $(($(date +%s) - start_s)) s"
