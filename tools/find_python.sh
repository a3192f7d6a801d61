#!/bin/sh
# Prints the path of a working Python, or nothing.
#
#   tools/find_python.sh 3.11 3.10+
#
# The arguments are versions, best first. "3.11" is exactly that version, "3.10+" is that or newer.
# For each of them it tries, in this order:
#   1. the command of that name on PATH (python3.11; for "3.10+": python3, then python3.N);
#   2. every version installed by pyenv.
# A command on PATH need not work: pyenv adds a shim for every installed version, and the shim fails
# if that version is not selected. So each candidate is started, to check its version and whether it
# can create an environment (Debian's python3 cannot).
set -u

pyenv_root=${PYENV_ROOT:-$( (pyenv root) 2>/dev/null || echo "${HOME:-/nonexistent}/.pyenv")}

# usable COMMAND MINIMUM MAXIMUM: prints the interpreter's real path if it works and matches.
usable() {
    "$1" -c '
import sys
low, high = (tuple(map(int, text.split("."))) for text in sys.argv[1:])
import ensurepip, venv
if low <= sys.version_info[:2] <= high:
    print(sys.executable)
' "$2" "$3" 2>/dev/null
}

# candidates VERSION: prints the commands to try, one per line, best first.
candidates() {
    case $1 in
    *+)
        echo python3
        for minor in 13 12 11 10 14; do echo "python3.$minor"; done
        ls -1d "$pyenv_root"/versions/3.*/bin/python3 2>/dev/null | sort -rV
        ;;
    *)
        echo "python$1"
        ls -1d "$pyenv_root/versions/$1"*/bin/"python$1" 2>/dev/null | sort -rV
        echo python3
        ;;
    esac
}

for wish in "$@"; do
    case $wish in
    *+) low=${wish%+} high=3.999 ;;
    *) low=$wish high=$wish ;;
    esac
    found=$(candidates "$wish" | while IFS= read -r command; do
        path=$(usable "$command" "$low" "$high") && [ -n "$path" ] && echo "$path" && break
    done)
    if [ -n "$found" ]; then
        echo "$found"
        exit 0
    fi
done
