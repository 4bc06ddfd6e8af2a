#!/usr/bin/env bash
# Checks resources and sources of the app without Android's build tools: aapt2 links the resources
# against an android.jar, kotlinc compiles the sources against it and against the runner. That jar is of
# API 23, so that the app uses nothing newer than its minSdk. Gradle's scripts are parsed only, since
# their API is not there. Makes no APK.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$PWD/build/toolchain
build=$PWD/build/android
jar=$tools/android/usr/lib/android-sdk/platforms/android-23/android.jar
source=android_demo/app/src/main
if ! command -v aapt2 >/dev/null; then
    install=(apt-get install -qq -y --no-install-recommends aapt)
    "${install[@]}" >/dev/null || { apt-get update -qq && "${install[@]}" >/dev/null; }
fi
runtimes/jvm/build.sh
rm -rf "$build" && mkdir -p "$build/classes"
sed 's/<manifest /&package="edgelin.demo" /' $source/AndroidManifest.xml >"$build/AndroidManifest.xml"
aapt2 compile --dir $source/res -o "$build/resources.zip"
aapt2 link -I "$jar" --manifest "$build/AndroidManifest.xml" --java "$build" --min-sdk-version 24 \
    --target-sdk-version 35 -o "$build/resources.apk" "$build/resources.zip"
runtimes/jvm/kotlinc.sh -no-jdk -d "$build/classes" \
    -cp "$tools/kotlin/lib/kotlin-stdlib.jar:$jar:$PWD/build/jvm/classes:$tools/aar/classes.jar" \
    "$build/edgelin/demo/R.java" $source/kotlin
scripts=(android_demo/*.gradle.kts android_demo/app/*.gradle.kts runtimes/jvm/*.gradle.kts)
found=$(runtimes/jvm/kotlinc.sh -Xallow-any-scripts-in-source-roots -d "$build/scripts" \
    -cp "$tools/kotlin/lib/kotlin-stdlib.jar" "${scripts[@]}" 2>&1 || true)
if ! grep -q "unresolved reference 'android'" <<<"$found" || grep "syntax error" <<<"$found"; then
    echo "a script of Gradle's cannot be parsed" >&2
    exit 1
fi
echo "the app's resources and sources compile, its scripts can be parsed"
