#!/usr/bin/env bash
# The Kotlin compiler that runtimes/toolchain.sh fetched: runtimes/jvm/kotlinc.sh ARGUMENTS
set -euo pipefail
kotlin=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/build/toolchain/kotlin/lib
path=$kotlin/annotations-13.0.jar
for name in compiler stdlib script-runtime reflect; do path=$path:$kotlin/kotlin-$name.jar; done
exec java -cp "$path:$kotlin/kotlinx-coroutines-core-jvm.jar" org.jetbrains.kotlin.cli.jvm.K2JVMCompiler \
    -no-stdlib -no-reflect -jvm-target 1.8 -Xsuppress-deprecated-jvm-target-warning "$@"
