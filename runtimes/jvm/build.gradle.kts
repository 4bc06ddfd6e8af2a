// `gradle run --args="../../bundles/demo 'The old house'"`, `gradle golden`
plugins {
    kotlin("jvm") version "2.2.20"
    application
}

repositories { mavenCentral() }

dependencies {
    implementation("com.microsoft.onnxruntime:onnxruntime:1.27.0")
    implementation("com.google.code.gson:gson:2.10.1")
}

kotlin { jvmToolchain(17) }

sourceSets["main"].kotlin.srcDir("src/example/kotlin")

application { mainClass = "RunKt" }

tasks.withType<JavaExec> { environment("ORT_DISABLE_TELEMETRY", "1") }

tasks.register<JavaExec>("golden") {
    mainClass = "edgelin.GoldenTestKt"
    classpath = sourceSets["test"].runtimeClasspath
    args("../golden", layout.buildDirectory.dir("golden").get().asFile.path)
}
