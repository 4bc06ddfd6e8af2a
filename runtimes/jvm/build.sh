#!/usr/bin/env bash
# Compiles the runner, its example and its test with the tools of runtimes/toolchain.sh, and runs what
# it is given with them: runtimes/jvm/build.sh edgelin.GoldenTestKt runtimes/golden build/jvm/work
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tools=$root/build/toolchain
libraries=$tools/kotlin/lib/kotlin-stdlib.jar:$tools/aar/classes.jar:$tools/gson/usr/share/java/gson.jar
classes=$root/build/jvm/classes
sources=$(find "$root/runtimes/jvm/src" -name '*.kt')
if [ ! -d "$classes" ] || [ -n "$(find $sources -newer "$classes")" ]; then
    rm -rf "$classes"
    "$root/runtimes/jvm/kotlinc.sh" -Werror -cp "$libraries" -d "$classes" $sources
fi
# In another locale Java would read the words of a command line, and names of files, as ASCII.
[ $# -eq 0 ] || LC_ALL=C.UTF-8 LD_LIBRARY_PATH=$tools/jvm LD_PRELOAD=$tools/jvm/libstub.so ORT_DISABLE_TELEMETRY=1 \
    exec java -Donnxruntime.native.path="$tools/jvm" -cp "$libraries:$classes" "$@"
