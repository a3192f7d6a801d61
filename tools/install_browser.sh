#!/bin/sh
# Installs Debian's Chromium and its driver, for the tests of the timeline's page. This needs root and
# apt (measured: 17 s and 500 MB). On other machines, those tests are skipped with a message.
set -u

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser: not installed (needs root and apt); its tests are skipped"
    exit 0
fi
# Tests that need the browser wait as long as this file names a process that is alive.
mkdir -p build
echo $$ >build/installing-browser
trap 'rm -f build/installing-browser' EXIT
start_s=$(date +%s)
export DEBIAN_FRONTEND=noninteractive
if apt-get update -qq >/dev/null 2>&1 &&
    apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null 2>&1; then
    echo "browser: installed in $(($(date +%s) - start_s)) s"
else
    echo "browser: could not be installed; its tests are skipped"
fi
