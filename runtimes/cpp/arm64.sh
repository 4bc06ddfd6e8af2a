#!/usr/bin/env bash
# Replays the golden streams on two emulated ARM64 processors: one without the instructions for int8 dot
# products (Cortex-A53) and one with them (A76). Takes minutes and some 150 MB of downloads, so that CI
# does not run it; needs Debian and root, to install a cross compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools=$PWD/build/toolchain
build=$PWD/build/cpp-arm64
runtimes/toolchain.sh arm64
mkdir -p "$build"
for source in edgelin test main; do
    aarch64-linux-gnu-g++ -std=c++17 -O1 -isystem "$tools/onnxruntime/include" \
        -isystem "$tools/debian/usr/include" -c "runtimes/cpp/$source.cpp" -o "$build/$source.o" &
done
wait
for program in test main; do
    aarch64-linux-gnu-g++ "$build/$program.o" "$build/edgelin.o" -L"$tools/arm64/lib" -lonnxruntime \
        -Wl,--allow-shlib-undefined -Wl,-rpath,"$tools/arm64/lib" -o "$build/edgelin-$program"
done
for processor in cortex-a53 cortex-a76; do
    echo "$processor"
    "$tools/arm64/usr/bin/qemu-aarch64" -L /usr/aarch64-linux-gnu -cpu "$processor" \
        "$build/edgelin-test" runtimes/golden "$build/work"
done
