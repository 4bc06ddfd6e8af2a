package edgelin

import com.google.gson.JsonArray
import com.google.gson.JsonElement
import com.google.gson.JsonObject
import java.io.File
import kotlin.system.exitProcess

/*
 * Replays the golden streams, and gives the runner what it must refuse: GoldenTestKt GOLDEN WORK, with
 * runtimes/golden and a folder for state files. "Golden streams" in runtimes/README.md describes them.
 */

private var checks = 0

private fun expect(good: Boolean, what: () -> String) {
    checks++
    if (good) return
    System.err.println("FAILED: ${what()}")
    exitProcess(1)
}

private fun refused(word: String, what: String, action: () -> Unit) {
    val error = try {
        action()
        null
    } catch (error: EdgelinException) {
        error.message!!
    }
    expect(error != null && word in error && '\n' !in error) { "$what is refused with '$word', not '$error'" }
}

private fun floats(value: JsonElement): List<Float> =
    if (value is JsonArray) value.flatMap { floats(it) } else listOf(value.asFloat)

private fun ids(value: JsonElement): IntArray =
    (if (value is JsonArray) value.flatMap { ids(it).toList() } else listOf(value.asInt)).toIntArray()

private fun divergence(wanted: List<Float>, found: List<Float>): Double {
    fun logs(x: List<Float>): List<Double> = Math.log(x.sumOf { Math.exp(it.toDouble()) }).let { sum -> x.map { it - sum } }
    return logs(wanted).zip(logs(found)).sumOf { (p, q) -> Math.exp(p) * (p - q) }
}

private class Golden(val folder: File, val variant: String, val work: File) {
    val content: JsonObject = parseJson(File(folder, "$variant.json").readText(), "golden").asJsonObject
    val calls: List<JsonObject> = content["calls"].asJsonArray.map { it.asJsonObject }
    val tolerance: JsonObject = content["tolerance"].asJsonObject
    val where = "${folder.name}/$variant"

    fun compare(answers: JsonElement, found: FloatArray, what: String) {
        val rows = answers.asJsonArray
        for ((row, answer) in rows.withIndex()) {
            if (answer.isJsonNull) continue
            val wanted = floats(answer)
            val here = found.slice(row * wanted.size until (row + 1) * wanted.size)
            val off = wanted.zip(here).maxOf { (a, b) -> Math.abs(a.toDouble() - b) }
            val alike = tolerance.has("kl") && divergence(wanted, here) <= tolerance["kl"].asDouble
            expect(off <= tolerance["outputs"].asDouble || alike) { "$where $what: off by $off" }
        }
    }

    /** Feeds every row of a call to a stream of its own; their answers one after the other. */
    fun feed(streams: List<Stream>, call: JsonObject): FloatArray {
        val lengths = call["lengths"]?.let { ids(it) }
        val answers = streams.mapIndexed { row, stream ->
            if (call.has("ids")) {
                val given = ids(call["ids"].asJsonArray[row])
                val read = given.copyOf(lengths?.get(row) ?: given.size)
                if (read.isEmpty()) FloatArray(stream.outputs?.size ?: 0) else stream.feed(read)
            } else {
                stream.feed(floats(call["features"].asJsonArray[row]).toFloatArray())
            }
        }
        val size = answers.maxOf { it.size }
        return FloatArray(size * answers.size).also { all ->
            answers.forEachIndexed { row, answer -> answer.copyInto(all, row * size) }
        }
    }

    private fun generate(stream: Stream, wanted: JsonObject, sampling: Sampling, what: String) = stream.fork().use { twin ->
        for (id in ids(wanted["ids"])) {
            if (!tolerance.has("kl")) expect(twin.choose(sampling) == id) { "$where $what: token" }
            twin.feed(intArrayOf(id))
        }
        compare(wanted["outputs"], twin.outputs!!, what)
    }

    private fun pieces(stream: Stream, wanted: JsonObject, sampling: Sampling, what: String) {
        if (tolerance.has("kl")) return
        val settings = sampling.copy(maxTokens = ids(wanted["ids"]).size)
        val found = stream.fork().use { it.generate(null, settings).toList() }
        val expected = wanted["pieces"].asJsonArray.map { it.asString }
        expect(found == expected) { "$where $what: pieces $found, not $expected" }
    }

    /** What follows after the calls. */
    fun finish(stream: Stream, what: String) {
        val greedy = content["greedy"]?.asJsonObject ?: return
        generate(stream, greedy, Sampling(temperature = 0.0), "$what greedy")
        pieces(stream, greedy, Sampling(temperature = 0.0), "$what greedy")
        val sampled = content["sampled"]?.asJsonObject ?: return
        val settings = sampled["settings"].asJsonObject
        val sampling = Sampling(
            temperature = settings["temperature"].asDouble, topK = settings["top_k"].asInt, topP = settings["top_p"].asDouble,
            minP = settings["min_p"].asDouble, repetitionPenalty = settings["repetition_penalty"].asDouble,
            seed = settings["seed"].asString.toULong(),
        )
        generate(stream, sampled, sampling, "$what sampled")
        pieces(stream, sampled, sampling, "$what sampled")
    }

    fun replay() = Bundle(File(folder, "bundle"), variant, threads = 1).use { bundle ->
        val streams = List(content["batch"].asInt) { bundle.stream("none") }
        repeat(2) { // once more after a reset
            streams.forEach { it.reset() }
            for (call in calls) compare(call["outputs"], feed(streams, call), "call")
        }
        val stream = streams[0]
        finish(stream, "")
        content["text"]?.asJsonObject?.let { text ->
            val found = bundle.tokenizer.encode(text["prompt"].asString)
            expect(found.contentEquals(ids(text["ids"]))) { "$where: tokens ${found.toList()}" }
        }
        if (content["batch"].asInt == 1 && calls[0].has("ids")) {
            bundle.stream("none").use { whole -> // in one call of feed
                whole.feed(ids(JsonArray().apply { calls.forEach { add(it["ids"]) } }))
                compare(calls.last()["outputs"], whole.outputs!!, "whole")
            }
        }
        content["state_file"]?.asString?.let { name ->
            bundle.stream("none").use { other ->
                val mine = File(work, "mine.state")
                expect(other.load(File(folder, name))) { "$where: its variant" }
                finish(other, "from Python's state")
                for (shorter in content["shorter"]?.asJsonArray?.map { it.asJsonObject } ?: emptyList()) {
                    other.load(File(folder, shorter["state_file"].asString))
                    compare(shorter["outputs"], other.feed(ids(shorter["ids"])), shorter["state_file"].asString)
                }
                stream.save(mine)
                other.load(mine)
                finish(other, "from our state")
                expect(other.position == stream.position) { "$where: position" }
            }
        }
        streams.forEach { it.close() }
    }
}

/** What a user can do wrong, each refused in one line, with the stream as it was. */
private fun refusals(golden: File, work: File) {
    val folder = File(golden, "fused/bundle")
    refused("no bundle", "a missing folder") { Bundle(File(work, "none")) }
    refused("no variant", "an unknown variant") { Bundle(folder, "model_q9") }
    Bundle(folder, "model", tested = work).use { bundle ->
        val stream = bundle.stream()
        refused("read nothing", "a token before the first step") { stream.choose(Sampling()) }
        stream.feed(intArrayOf(1, 2, 3))
        refused("out of range", "an id out of range") { stream.feed(intArrayOf(1, bundle.manifest.outputSize)) }
        refused("nothing to read", "no step") { stream.feed(intArrayOf()) }
        refused("token ids", "features") { stream.feed(floatArrayOf(0f)) }
        refused("temperature", "a negative temperature") { Sampling(temperature = -1.0) }
        refused("no capsule", "an unknown capsule") { bundle.stream("nobody") }
        val file = File(work, "a.state")
        val broken = File(work, "b.state")
        stream.save(file)
        val saved = file.readBytes()
        for (at in saved.indices step 97) { // any byte, and any end
            broken.writeBytes(saved.copyOf().also { it[at] = (it[at].toInt() xor 0x41).toByte() })
            refused("", "a damaged state file") { stream.load(broken) }
            broken.writeBytes(saved.copyOf(at))
            refused("", "a cut state file") { stream.load(broken) }
        }
        refused("another model", "another model's state") { stream.load(File(golden, "plain/model.state")) }
        refused("cannot be written", "a missing folder") { stream.save(File(work, "no/c.state")) }
        expect(stream.position == 3L) { "after all of that the stream stands where it stood" }
        stream.load(file)
        expect(work.list()!!.any { it.endsWith(".tested") }) { "the self-test is noted" }
    }
    val copy = File(work, "copy")
    folder.copyRecursively(copy, overwrite = true)
    val manifest = File(copy, "edgelin.json")
    manifest.writeText(manifest.readText().replace("\"chunk\": 64", "\"chunk\": 63"))
    refused("changed after export", "a changed manifest") { Bundle(copy, "model") }
    manifest.writeText("{\"format\": 1, \"a\": ${"[".repeat(100_000)}${"]".repeat(100_000)}}")
    refused("", "a deep manifest") { Bundle(copy, "model") }
    File(folder, "edgelin.json").copyTo(manifest, overwrite = true)
    val weights = File(copy, "onnx/model.onnx_data")
    weights.writeBytes(weights.readBytes().also { it[100] = (it[100].toInt() xor 1).toByte() })
    refused("sha256", "changed weights") { Bundle(copy, "model") }
}

fun main(words: Array<String>) {
    val (golden, work) = words.map { File(it) }
    work.mkdirs()
    var streams = 0
    for (folder in golden.listFiles()!!.filter { File(it, "bundle").isDirectory }.sorted()) {
        for (file in folder.listFiles()!!.filter { it.extension == "json" }.sorted()) {
            Golden(folder, file.nameWithoutExtension, work).replay()
            streams++
        }
    }
    expect(streams > 0) { "golden streams in $golden" }
    refusals(golden, work)
    println("$streams golden streams, $checks checks passed")
}
