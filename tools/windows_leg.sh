#!/bin/sh
# Runs the windows leg: tests with CPython for Windows and torch's own Windows wheels, under Wine. On
# arm64 machines, box64 translates the x86-64 code.
#
#   tools/windows_leg.sh test [PYTEST ARGUMENTS]   the tests marked `windows`, of all files or of those given
#   tools/windows_leg.sh python ARGUMENTS...       python.exe, in the same copy of this repository
#   tools/windows_leg.sh build                     only what follows
#
# The first call builds build/windows/tree (tools/windows_tree.sh), which needs root and a Debian apt.
# Programs run as the user nobody, with mount and process namespaces of their own: nothing is mounted
# in the tree for anybody else, no process outlives the call, and they cannot change this repository,
# of which they see a copy as drive D:.
set -eu

NOBODY=65534
LIMIT_S=3600
MAX_THREADS=1000 # of all processes. Broken, Wine starts one process after the other
NO_NETWORK=75 # exit status of tools/windows_tree.sh
ENDING_S=60 # the time that the last processes have to end
# Microsoft's libraries, not Wine's.
NATIVE=ucrtbase,concrt140,msvcp140,msvcp140_1,msvcp140_2,msvcp140_atomic_wait,vcomp140
NATIVE=$NATIVE,vcruntime140,vcruntime140_1,vcruntime140_threads

state=$PWD/build/windows
tree=$state/tree
python='C:\Python313\python.exe'

skip() {
    echo "windows: skipped ($1)"
    [ -z "${SKIP_NOTE:-}" ] || echo "$1" >"$SKIP_NOTE" # for the summary of make test-all
    exit 0
}

# mirror: prints the address from which apt takes Debian on this machine, or nothing.
mirror() {
    apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^Debian|Debian|main|//p' | head -n 1
}

check_machine() {
    case "$(uname -s) $(uname -m)" in
    'Linux x86_64') ;;
    'Linux aarch64') [ "$(getconf PAGESIZE)" = 4096 ] || skip "box64 and Wine need pages of 4 KiB" ;;
    *) skip "needs Linux on x86-64 or arm64" ;;
    esac
    [ "$(id -u)" = 0 ] || skip "needs root, to build and enter build/windows"
    command -v apt-get >/dev/null || skip "needs apt"
    [ -n "$(mirror)" ] || skip "apt has no Debian mirror"
    unshare --mount --pid --fork --propagation private mount -t tmpfs none /tmp 2>/dev/null ||
        skip "namespaces and mounts are not permitted here"
}

# build: builds the tree if there is none, or if its scripts and lists have changed since. One call at
# a time: Wine's server belongs to one process namespace.
build() {
    check_machine
    mkdir -p "$state"
    exec 9>"$state/lock"
    flock --timeout $LIMIT_S 9 || { echo "windows: another call is still running" >&2; exit 1; }
    stamp=$(cat tools/windows_tree.sh requirements/windows*.txt | cksum)
    [ "$(cat "$state/ready" 2>/dev/null)" != "$stamp" ] || return 0
    rm -f "$state/ready"
    status=0
    tools/windows_tree.sh || status=$?
    [ $status != $NO_NETWORK ] || skip "the Debian mirror or the package index does not answer"
    [ $status = 0 ] || exit $status
    echo "$stamp" >"$state/ready"
}

# copy_repo: copies this repository to drive D:.
copy_repo() {
    rm -rf "$tree/repo"
    mkdir "$tree/repo"
    tar -c --exclude=__pycache__ Makefile README.md docs examples pyproject.toml src tests tools |
        tar -x -C "$tree/repo"
    chown -R $NOBODY:$NOBODY "$tree/repo"
}

# isolated ARGUMENTS...: runs a Windows program in namespaces of its own.
isolated() {
    unshare --mount --pid --fork --kill-child --propagation private "$0" inside "$@"
}

# inside ARGUMENTS...: the same, once in the namespaces.
inside() {
    mount -t proc proc "$tree/proc"
    mount --rbind /sys "$tree/sys"
    mount -t tmpfs -o mode=755 tmpfs "$tree/dev"
    for device in null zero random urandom; do
        : >"$tree/dev/$device"
        mount --bind "/dev/$device" "$tree/dev/$device"
    done
    status=0
    in_tree $LIMIT_S /usr/lib/wine/wine64 "$@" || status=$?
    # Returns when the last Windows program has ended.
    if ! in_tree $ENDING_S /usr/lib/wine/wineserver64 -w; then
        echo "windows: these processes were left behind:" >&2
        for process in "$tree"/proc/[0-9]*; do tr '\0' ' ' <"$process/cmdline" && echo; done >&2
        status=1
    fi
    return $status
}

# in_tree LIMIT_S COMMAND...: as nobody, in the tree, with a fresh environment. KMP_AFFINITY: OpenMP's
# affinity needs a function that Wine lacks (GetNumaNodeProcessorMaskEx).
in_tree() {
    limit_s=$1
    shift
    if [ "$(uname -m)" = aarch64 ]; then set -- /usr/bin/box64 "$@"; fi
    env -i PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/home XDG_RUNTIME_DIR=/home LC_ALL=C.UTF-8 DISPLAY= \
        BOX64_LOG=0 BOX64_NOBANNER=1 BOX64_DYNAREC_CALLRET=1 \
        BOX64_LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu \
        WINEPREFIX=/home/prefix WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml=;$NATIVE=n,b" \
        KMP_AFFINITY=disabled PYTHONPATH='D:\src' PYTHONPYCACHEPREFIX='C:\bytecode' \
        timeout --foreground "$limit_s" prlimit --nproc=$MAX_THREADS \
        unshare --root="$tree" --wd=/repo --setgid=$NOBODY --setuid=$NOBODY "$@"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
build) build ;;
test)
    build
    copy_repo
    case " $*" in
    *" tests"*) ;;
    *) set -- "$@" $(grep -rl --include='test_*.py' 'mark\.windows' tests) ;;
    esac
    isolated "$python" tools/run_pytest.py windows -m windows "$@"
    ;;
python)
    build
    copy_repo
    isolated "$python" "$@"
    ;;
wine) isolated "$@" ;;
inside | mirror) $command "$@" ;;
*)
    echo "usage: tools/windows_leg.sh build|test|python ARGUMENTS..." >&2
    exit 2
    ;;
esac
