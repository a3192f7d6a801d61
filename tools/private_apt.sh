#!/bin/sh
# Runs an apt command with a state of its own: it knows one Debian suite, and thinks nothing is
# installed. Packages are downloaded from the mirror that this machine's apt uses, and can be unpacked
# with dpkg -x. Nothing is installed.
#
#   [TYPES=deb-src] tools/private_apt.sh FOLDER SUITE ARCHITECTURE COMMAND...
set -eu

folder=$1 suite=$2 architecture=$3
shift 3
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial" "$folder/sources"
: >"$folder/status"
cat >"$folder/sources/debian.sources" <<END
Types: ${TYPES:-deb}
URIs: $(tools/windows_leg.sh mirror)
Suites: $suite
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
cat >"$folder/apt.conf" <<END
Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "$folder/sources";
Dir::State::lists "$folder/lists"; Dir::State::status "$folder/status"; Dir::Cache "$folder/cache";
APT::Architecture "$architecture"; APT::Architectures { "$architecture"; };
APT::Sandbox::User "root"; Acquire::Languages "none"; Acquire::Retries "3";
END
APT_CONFIG="$folder/apt.conf" "$@"
