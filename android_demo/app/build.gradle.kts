import org.jetbrains.kotlin.gradle.dsl.JvmTarget

plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
}

android {
    namespace = "edgelin.demo"
    compileSdk = 35

    defaultConfig {
        applicationId = "edgelin.demo"
        minSdk = 24
        targetSdk = 35
        versionCode = 1
        versionName = "0.1.0"
        ndk { abiFilters += listOf("arm64-v8a", "x86_64") } // phones, and the emulator
    }

    // The runner is not copied: its sources are compiled in.
    sourceSets["main"].kotlin.srcDir("../../runtimes/jvm/src/main/kotlin")

    // Libraries stay uncompressed and aligned to 16 KB pages in the APK, and are mapped from there.
    packaging { jniLibs { useLegacyPackaging = false } }

    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

kotlin { compilerOptions { jvmTarget = JvmTarget.JVM_17 } }

dependencies {
    implementation("com.microsoft.onnxruntime:onnxruntime-android:1.29.0")
    implementation("com.google.code.gson:gson:2.10.1")
}
