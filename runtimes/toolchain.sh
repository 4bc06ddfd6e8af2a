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
    (cd "$target/archives" && apt-get download -qq "$@" 2>/dev/null) ||
        (apt-get update -qq && cd "$target/archives" && apt-get download -qq "$@")
    for archive in "$target"/archives/*.deb; do dpkg-deb -x "$archive" "$target"; done
}

# The AAR of onnxruntime-android: headers, Java classes, native libraries.
aar() {
    [ -d "$TOOLS/aar/headers" ] && return
    npm_files "$ORT_JAVA" Plugins/Android/onnxruntime.aar "$TOOLS/npm"
    unzip -qo "$TOOLS/npm/Plugins/Android/onnxruntime.aar" classes.jar 'headers/*' \
        'jni/x86_64/*' 'jni/arm64-v8a/libonnxruntime4j_jni.so' -d "$TOOLS/aar"
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

for piece in "$@"; do "$piece"; done
