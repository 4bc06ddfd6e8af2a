package edgelin

import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtLoggingLevel
import ai.onnxruntime.OrtSession
import java.io.File
import java.util.Random

/**
 * A checked bundle with one onnxruntime session; makes any number of streams.
 *
 * Official builds of onnxruntime report usage. A JVM cannot set variables of its own process, so
 * whoever starts it sets `ORT_DISABLE_TELEMETRY=1` (on Android, the app does with `Os.setenv` before
 * the first bundle); what remains in the API is turned off here.
 *
 * @param folder the bundle
 * @param variant null: the bundle's default one
 * @param threads of onnxruntime; 0: its own choice, the physical cores
 * @param tested folder where it is noted that `golden.json` was replayed with success, which the first
 *   load on a device does; null: every load does
 */
class Bundle(val folder: File, variant: String? = null, threads: Int = 0, tested: File? = null) : AutoCloseable {
    val manifest: Manifest = Manifest.read(folder)
    val variant: String
    internal val environment: OrtEnvironment
    internal val session: OrtSession

    /** Whether float32 states are updated in their own buffers. */
    val inPlace: Boolean

    /** The tokenizer, read on first use. */
    val tokenizer: Tokenizer by lazy {
        val file = manifest.tokenizerFile ?: refuse("$folder reads features, not text")
        Tokenizer.read(inside(folder, file), manifest.outputSize)
    }

    init {
        val most = 8 * Runtime.getRuntime().availableProcessors()
        if (threads !in 0..most) refuse("threads is $threads; allowed: 0 (onnxruntime's own choice) .. $most")
        val (name, chosen) = manifest.variant(variant)
        this.variant = name
        environment = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL)
        environment.setTelemetry(false)
        val wanted = manifest.content["min_onnxruntime"].asString
        if (older(environment.version, wanted)) {
            refuse("$folder needs onnxruntime >= $wanted, this is ${environment.version}")
        }
        for (files in listOf(manifest.content["files"], chosen["files"])) {
            for ((path, record) in files.asJsonObject.entrySet()) checkFile(inside(folder, path), record.asJsonObject)
        }
        session = open(inside(folder, chosen["file"].asString), threads)
        try {
            inPlace = testCalls(false) == testCalls(true)
            testDevice(tested)
        } catch (error: Throwable) {
            session.close()
            throw error
        }
    }

    /**
     * A new stream; any number of them share the session.
     *
     * @param capsule where it begins; null: the bundle's default capsule, if there is one; "none":
     *   before the first step
     */
    fun stream(capsule: String? = null): Stream {
        val common = manifest.content["default_capsule"]?.takeIf { it.isJsonPrimitive }?.asString
        val name = capsule ?: common ?: "none"
        if (name == "none") return Stream(this, null)
        val record = manifest.content["capsules"]?.asJsonObject?.get(name)?.asJsonObject
            ?: refuse("the bundle has no capsule $name")
        val file = inside(folder, record["file"].asString)
        checkFile(file, record)
        return Stream(this, Saved.read(file))
    }

    override fun close() = session.close()

    private fun open(graph: File, threads: Int): OrtSession {
        val session = try {
            OrtSession.SessionOptions().use { options ->
                options.setIntraOpNumThreads(threads)
                options.setInterOpNumThreads(1)
                options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL)
                options.addConfigEntry("session.force_spinning_stop", "1") // no core burns between calls
                // Rounded weights in standard operators become float ones at once, not at every step.
                options.addConfigEntry("session.disable_quant_qdq", "1")
                environment.createSession(graph.path, options)
            }
        } catch (error: OrtException) {
            refuse("onnxruntime ${environment.version} cannot load $graph: ${error.message}", error)
        }
        val stored = session.metadata.customMetadata["edgelin"]
        if (stored == null || canonicalJson(parseJson(stored, graph.path)) != canonicalJson(manifest.ioPart())) {
            session.close()
            refuse("$graph does not carry the contract of edgelin.json; the files are of different exports")
        }
        return session
    }

    /** All bits that two calls from random states answer. */
    private fun testCalls(inPlace: Boolean): List<Int> {
        val random = Random(0)
        Buffers(this, inPlace).use { buffers ->
            buffers.put(manifest.states.map { state ->
                val numbers = buffers.initial(state)
                numbers.floats?.let { floats -> for (i in floats.indices) floats[i] = random.nextFloat() }
                numbers
            })
            val found = ArrayList<Int>()
            for (time in listOf(minOf(TEST_STEPS, manifest.chunk), 1)) {
                val features = if (manifest.readsFeatures) FloatArray(time * manifest.featureSize) { random.nextFloat() } else null
                val ids = if (features == null) LongArray(time) { random.nextInt(manifest.outputSize).toLong() } else null
                found.add(buffers.run(ids, features).map { it.toRawBits() }.hashCode())
                for (state in buffers.get()) {
                    // Raw bits: a hash of them differs where any of them does, all but surely.
                    found.add(state.floats?.map { it.toRawBits() }?.hashCode() ?: state.longs.contentHashCode())
                }
            }
            return found
        }
    }

    /** Replays golden.json on the first load of this bundle and variant with this onnxruntime. */
    private fun testDevice(tested: File?) {
        val what = sha256((manifest.digest + variant + environment.version).toByteArray())
        val note = tested?.let { File(it, "edgelin-$what.tested") }
        if (note != null && note.exists()) return
        try {
            replayGolden()
        } catch (error: RuntimeException) { // a key is missing, or of another type
            if (error is EdgelinException) throw error
            refuse("golden.json of $folder cannot be replayed: $error; export again", error)
        }
        if (note != null) replace(note, emptyList())
    }

    private fun replayGolden() {
        val golden = parseJson(readText(File(folder, "golden.json")), "golden.json").asJsonObject
        val tolerance = golden["tolerance"].asJsonObject[variant].asJsonObject
        fun near(found: Double, wanted: Double, room: Double, what: String) {
            if (!(Math.abs(found - wanted) <= room)) {
                refuse(
                    "$folder computes something else on this machine than where it was exported ($what): " +
                        "take another variant, or another onnxruntime",
                )
            }
        }
        Stream(this, null).use { stream ->
            for (piece in golden["pieces"].asJsonArray.map { it.asJsonObject }) {
                val answers = if (manifest.readsFeatures) {
                    val steps = piece["features"].asJsonArray.flatMap { step -> step.asJsonArray.map { it.asFloat } }
                    stream.feed(steps.toFloatArray())
                } else {
                    stream.feed(piece["ids"].asJsonArray.map { it.asInt }.toIntArray())
                }
                val top = piece["top"].asJsonObject
                val wanted = top["logits"].asJsonArray
                for ((i, id) in top["ids"].asJsonArray.withIndex()) {
                    near(answers[id.asInt].toDouble(), wanted[i].asDouble, tolerance["logits"].asDouble, manifest.output)
                }
            }
            val states = stream.saved().tensors
            for ((name, entry) in golden["states"].asJsonObject.entrySet()) {
                val state = states.getValue(name)
                val largest = entry.asJsonObject["max_abs"].asDouble
                for (sample in entry.asJsonObject["samples"].asJsonArray.map { it.asJsonArray }) {
                    val at = sample[0].asInt
                    val room = if (state.floats != null) tolerance["states"].asDouble * largest else 0.0
                    val found = state.floats?.get(at)?.toDouble() ?: state.longs!![at].toDouble()
                    near(found, sample[1].asDouble, room, "state $name")
                }
            }
        }
    }

    private companion object {
        const val TEST_STEPS = 5

        fun older(one: String, two: String): Boolean {
            fun numbers(text: String) = Regex("\\d+").findAll(text).take(3).map { it.value.toInt() }.toList()
            val (a, b) = numbers(one) to numbers(two)
            for (i in 0 until minOf(a.size, b.size)) if (a[i] != b[i]) return a[i] < b[i]
            return false
        }
    }
}
