#!/usr/bin/env bash
# Compiles the runner, its example and its test with the tools of runtimes/toolchain.sh, and runs what
# it is given with them: runtimes/jvm/build.sh edgelin.GoldenTestKt runtimes/golden build/jvm/work
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tools=$root/build/toolchain
kotlin=$tools/kotlin/lib
libraries=$kotlin/kotlin-stdlib.jar:$tools/aar/classes.jar:$tools/gson/usr/share/java/gson.jar
classes=$root/build/jvm/classes
sources=$(find "$root/runtimes/jvm/src" -name '*.kt')
if [ ! -d "$classes" ] || [ -n "$(find $sources -newer "$classes")" ]; then
    rm -rf "$classes"
    java -cp "$kotlin/kotlin-compiler.jar:$kotlin/kotlin-stdlib.jar:$kotlin/kotlin-script-runtime.jar:$kotlin/kotlin-reflect.jar:$kotlin/kotlinx-coroutines-core-jvm.jar:$kotlin/annotations-13.0.jar" \
        org.jetbrains.kotlin.cli.jvm.K2JVMCompiler -no-stdlib -no-reflect -jvm-target 1.8 -Werror \
        -Xsuppress-deprecated-jvm-target-warning -cp "$libraries" -d "$classes" $sources
fi
[ $# -eq 0 ] || LD_LIBRARY_PATH=$tools/jvm LD_PRELOAD=$tools/jvm/libstub.so ORT_DISABLE_TELEMETRY=1 \
    exec java -Donnxruntime.native.path="$tools/jvm" -cp "$libraries:$classes" "$@"
