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

# torch_versions LEG: the lines that fix torch and torchvision.
torch_versions() { grep '^torch\(vision\)\{0,1\}==' "constraints/$1.txt"; }

# link_torch LEG: if another leg's environment has the same torch, hard links to it and its libraries.
# On x86-64 torch 2.8.0 brings 6 GB of CUDA libraries, minutes of unpacking. pip replaces files and
# never writes into them, so the environments stay independent.
link_torch() {
    [ -e ".venv-$1/.ready" ] && [ "$(torch_versions "$1")" = "$(torch_versions "$leg")" ] || return 0
    for ours in "$env_dir"/lib/python*/site-packages; do
        theirs=.venv-$1/${ours#"$env_dir/"}
        for path in "$theirs"/torch "$theirs"/torch-* "$theirs"/torch.libs "$theirs"/torchgen \
            "$theirs"/functorch "$theirs"/torchvision* "$theirs"/triton* "$theirs"/nvidia \
            "$theirs"/nvidia_*_cu*; do
            [ ! -e "$path" ] || cp -al "$path" "$ours/" 2>/dev/null || cp -a "$path" "$ours/"
        done
    done
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
    [ "$leg" != formats ] || link_torch vision
    [ "$leg" != ray ] || link_torch remote
else
    echo "$leg: refreshing $env_dir"
fi

pip_install --requirement requirements/build.txt
pip_install --requirement "requirements/$leg.txt" --no-build-isolation --editable .
"$env_dir/bin/python" -m pip --disable-pip-version-check check
touch "$env_dir/.ready"
echo "$leg: $env_dir is ready after $(($(date +%s) - start_s)) s"
