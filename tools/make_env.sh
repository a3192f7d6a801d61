#!/bin/sh
# Builds or refreshes the environment of one test leg.
#
#   tools/make_env.sh LEG ENV_DIR PYTHON_WISH...
#
# LEG names requirements/LEG.txt and constraints/LEG.txt; the wishes go to find_python.sh. All
# packages are resolved in one pip command under the constraints, so nothing can move torch. On
# success ENV_DIR/.ready is new; an environment without it is half built and is built again.
set -eu

leg=$1 env_dir=$2
shift 2

# -qq: pip's progress and warnings stay away, its errors do not. --no-compile: thousands of files of
# torch that no test imports need no bytecode.
pip_install() {
    "$env_dir/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-compile \
        --prefer-binary --constraint "constraints/$leg.txt" "$@"
}

start_s=$(date +%s)
if [ ! -e "$env_dir/.ready" ]; then
    python=$("$(dirname "$0")/find_python.sh" "$@")
    if [ -z "$python" ]; then
        echo "$leg: no Python that starts was found (wanted: $*)" >&2
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
