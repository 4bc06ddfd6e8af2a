#!/usr/bin/env bash
# Fetches what the tests of the C++ and JVM runners build with, into build/toolchain; what is there
# already stays. Only tests need this: an app takes onnxruntime from its makers, as cpp/README.md and
# ../android_demo/README.md say.
#
#   runtimes/toolchain.sh cpp     onnxruntime's headers and the library of the Python package; json
#   runtimes/toolchain.sh jvm     kotlinc, onnxruntime's Java API on a desktop JVM, gson
#   runtimes/toolchain.sh arm64   a cross compiler, qemu, onnxruntime for ARM64
#   runtimes/toolchain.sh android an android.jar to compile the app's sources against
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
TOOLS=$PWD/build/toolchain
ORT_JAVA=com.github.asus4.onnxruntime@0.4.9  # carries the AAR of onnxruntime-android 1.29.0
KOTLIN=kotlin-compiler@2.4.20
mkdir -p "$TOOLS/downloads"

# One file of a package of the npm registry, unpacked: package@version, path, target.
npm_files() {
    local archive
    archive=$TOOLS/downloads/$(echo "$1" | tr '@/' '-_').tgz
    if [ ! -f "$archive" ]; then
        rm -rf "$archive.part" && mkdir "$archive.part"
        (cd "$archive.part" && npm pack --silent "$1" >/dev/null)
        mv "$archive.part"/*.tgz "$archive" && rmdir "$archive.part"
    fi
    mkdir -p "$3"
    tar -xzf "$archive" -C "$3" --strip-components=1 "package/$2"
}

# Debian packages, unpacked into a folder without being installed: target, packages.
debian() {
    local target=$1
    shift
    mkdir -p "$target/archives"
    (cd "$target/archives" && apt-get download -qq -o APT::Sandbox::User=root "$@" 2>/dev/null) ||
        (apt-get update -qq && cd "$target/archives" &&
        apt-get download -qq -o APT::Sandbox::User=root "$@")
    for archive in "$target"/archives/*.deb; do dpkg-deb -x "$archive" "$target"; done
}

# The same from another suite of Debian than the machine's: suite, target, packages.
debian_of() (
    local suite=$1 target=$2 apt=$TOOLS/apt-$1
    shift 2
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$target"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
        "http://deb.debian.org/debian $suite main" >"$apt/sources.list"
    local options=(-qq -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update && cd "$target" && apt-get "${options[@]}" download "$@" &&
        for archive in *.deb; do dpkg-deb -x "$archive" .; done
)

# The AAR of onnxruntime-android: headers, Java classes, native libraries.
aar() {
    [ -d "$TOOLS/aar/headers" ] && return
    npm_files "$ORT_JAVA" Plugins/Android/onnxruntime.aar "$TOOLS/npm"
    unzip -qo "$TOOLS/npm/Plugins/Android/onnxruntime.aar" classes.jar 'headers/*' \
        'jni/x86_64/*' -d "$TOOLS/aar"
}

# The library of the installed Python package, under the names that linkers and loaders ask for.
library() {
    local found
    mkdir -p "$TOOLS/onnxruntime/lib"
    found=$("$PYTHON" -c 'import glob, importlib.util as u
print(glob.glob(u.find_spec("onnxruntime").submodule_search_locations[0] + "/capi/libonnxruntime.so.*")[0])')
    for name in libonnxruntime.so.1 libonnxruntime.so; do
        ln -sf "$found" "$TOOLS/onnxruntime/lib/$name"
    done
}

cpp() {
    aar
    library
    ln -sfn "$TOOLS/aar/headers" "$TOOLS/onnxruntime/include"
    [ -f "$TOOLS/debian/usr/include/nlohmann/json.hpp" ] || debian "$TOOLS/debian" nlohmann-json3-dev
}

# onnxruntime's Java API for a desktop JVM. Its makers publish it on Maven Central; where that cannot be
# reached, the native half of the AAR, which is linked against Android's C library, is made to load
# with glibc: symbol versions taken out, the names of its libraries as links, one function stubbed.
jvm() {
    local jvm=$TOOLS/jvm
    aar
    library
    [ -f "$TOOLS/kotlin/lib/kotlin-compiler.jar" ] || npm_files "$KOTLIN" lib "$TOOLS/kotlin"
    [ -f "$TOOLS/gson/usr/share/java/gson.jar" ] || debian "$TOOLS/gson" libgoogle-gson-java
    mkdir -p "$jvm"
    "$PYTHON" - "$TOOLS/aar/jni/x86_64/libonnxruntime4j_jni.so" "$jvm/libonnxruntime4j_jni.so" <<'END'
import struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
start, = struct.unpack_from("<Q", data, 32)
size, count = struct.unpack_from("<HH", data, 54)
for at in range(start, start + size * count, size):
    kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, at)
    for entry in range(offset, offset + length, 16) if kind == 2 else ():  # PT_DYNAMIC
        tag, = struct.unpack_from("<Q", data, entry)
        if tag in (0x6FFFFFFE, 0x6FFFFFFF, 0x6FFFFFF0):  # VERNEED, VERNEEDNUM, VERSYM
            struct.pack_into("<Q", data, entry, 0x6FFFF000)
open(sys.argv[2], "wb").write(data)
END
    echo 'void *OrtSessionOptionsAppendExecutionProvider_Nnapi(void) { return 0; }' |
        gcc -shared -fPIC -x c - -o "$jvm/libstub.so"
    ln -sf "$TOOLS/onnxruntime/lib/libonnxruntime.so" "$jvm/libonnxruntime.so"
    for name in c.so.6 m.so.6 dl.so.2; do
        ln -sf "$(gcc -print-file-name=lib$name)" "$jvm/lib${name%%.*}.so"
    done
}

# For cpp/arm64.sh: Debian 12's qemu 7.2 crashes when it loads onnxruntime, that of Debian 13 does not.
arm64() {
    local wheels=$TOOLS/arm64
    cpp
    command -v aarch64-linux-gnu-g++ >/dev/null ||
        apt-get install -qq -y --no-install-recommends g++-aarch64-linux-gnu >/dev/null
    [ -f "$wheels/usr/bin/qemu-aarch64" ] || debian_of trixie "$wheels" qemu-user
    if [ ! -f "$wheels/lib/libonnxruntime.so.1" ]; then
        "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels" \
            --platform manylinux_2_28_aarch64 --python-version 3.11 \
            "onnxruntime==$("$PYTHON" -c 'import onnxruntime; print(onnxruntime.__version__)')"
        mkdir -p "$wheels/lib"
        unzip -qoj "$wheels"/onnxruntime-*.whl 'onnxruntime/capi/libonnxruntime.so.*' -d "$wheels/lib"
        for name in libonnxruntime.so.1 libonnxruntime.so; do
            ln -sf "$(basename "$(ls "$wheels"/lib/libonnxruntime.so.*.*)")" "$wheels/lib/$name"
        done
    fi
}

# Android's own classes, to compile the app's sources against: the newest android.jar that Debian has.
android() {
    jvm
    [ -f "$TOOLS/android/usr/lib/android-sdk/platforms/android-23/android.jar" ] ||
        debian_of sid "$TOOLS/android" libandroid-23-java ||
        debian_of bullseye "$TOOLS/android" libandroid-23-java
}

for piece in "$@"; do "$piece"; done
