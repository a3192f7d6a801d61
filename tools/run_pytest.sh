#!/bin/sh
# pytest with the given interpreter and arguments. Tests that fail are run once more, alone: one that
# fails only beside others is named as unsteady, so that it is seen and mended, and fails no leg.
# Usage: tools/run_pytest.sh PYTHON CACHE [ARGUMENTS...]
set -u

python=$1 cache=.pytest_cache/$2
shift 2
"$python" -m pytest -o cache_dir="$cache" "$@"
status=$?
if [ "$status" -ne 1 ]; then exit "$status"; fi
echo
echo "== once more, alone: what failed"
"$python" -m pytest -o cache_dir="$cache" --last-failed --last-failed-no-failures none "$@"
status=$?
if [ "$status" -eq 0 ]; then echo "== UNSTEADY: these failed beside others and passed alone. Mend them."; fi
exit "$status"
