#!/bin/sh
# Gets the programs of Debian that tests use. This needs root and apt. On other machines, those tests
# are skipped with a message.
#
#   chromium, chromium-driver   installed, for the timeline's page (measured: 17 s and 500 MB)
#   prometheus                  unpacked in build/prometheus, for the metrics endpoint. Installing it
#                               would start a service
set -u

has_browser() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }
has_prometheus() { command -v prometheus >/dev/null || [ -x build/prometheus/usr/bin/prometheus ]; }

if has_browser && has_prometheus; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser, Prometheus: not installed (needs root and apt); their tests are skipped"
    exit 0
fi
# Tests that need the programs wait as long as this file names a process that is alive.
mkdir -p build
echo $$ >build/installing-programs
trap 'rm -f build/installing-programs' EXIT
start_s=$(date +%s)
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null 2>&1
has_browser ||
    apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null 2>&1
has_prometheus || {
    mkdir -p build/prometheus
    (cd build/prometheus && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . &&
        rm prometheus_*.deb usr/bin/promtool) >/dev/null 2>&1
}
if has_browser; then said="browser: installed"; else said="browser: not installed, its tests are skipped"; fi
if has_prometheus; then said="$said; Prometheus: installed"; else
    said="$said; Prometheus: not installed, its test is skipped"
fi
echo "$said ($(($(date +%s) - start_s)) s)"
