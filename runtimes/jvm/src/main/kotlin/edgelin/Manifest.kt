package edgelin

import com.google.gson.JsonElement
import com.google.gson.JsonObject
import com.google.gson.JsonParseException
import com.google.gson.JsonParser
import com.google.gson.JsonPrimitive
import java.io.File
import java.io.IOException
import java.math.BigDecimal
import java.math.MathContext
import java.math.RoundingMode
import java.security.MessageDigest

/** What went wrong, in one line: what was given, what is allowed, what to do next. */
class EdgelinException(message: String, cause: Throwable? = null) : RuntimeException(message, cause)

internal fun refuse(message: String, cause: Throwable? = null): Nothing =
    throw EdgelinException(message.replace('\n', ' '), cause)

/** A state tensor of the manifest; -1 in [shape] (batch left out) is the axis that grows. */
class State(
    val name: String,
    val input: String,
    val output: String,
    val kind: String,
    val shape: LongArray,
    val isFloat: Boolean,
    val initial: Double,
) {
    val grows: Boolean get() = shape.contains(-1)

    /** Shape, with a batch of one, after so many steps. */
    fun sized(past: Long): LongArray = longArrayOf(1L) + shape.map { if (it < 0) past else it }
}

/** `edgelin.json`, as far as a runner needs it; see runtimes/README.md. */
class Manifest private constructor(val content: JsonObject, where: String) {
    val modelHash: String = content["model_hash"].asString
    val digest: String = content["digest"].asString
    val input: String
    val output: String
    val chunk: Int = content["chunk"].asInt
    val featureSize: Int
    val outputSize: Int
    val labels: List<String>
    val states: List<State>
    val ends: Set<Int>
    val tokenizerFile: String?

    init {
        val source = content["input"].asJsonObject
        val answer = content["output"].asJsonObject
        input = source["name"].asString
        output = answer["name"].asString
        if (source["kind"].asString == "features") {
            featureSize = source["feature_size"].asInt
            outputSize = answer["size"].asInt
            labels = answer["labels"].asJsonArray.map { it.asString }
            ends = emptySet()
            tokenizerFile = null
        } else {
            featureSize = 0
            outputSize = source["vocab_size"].asInt
            labels = emptyList()
            val tokenizer = content["tokenizer"].asJsonObject
            tokenizerFile = tokenizer["file"].asString
            val more = tokenizer["eos_token_ids"]?.asJsonArray?.map { it.asInt } ?: emptyList()
            ends = more.toSet() + tokenizer["eos_token_id"].asInt
        }
        val limit = content["max_time"]
        val fits = limit.isJsonNull || chunk <= limit.asInt
        if (chunk < 1 || !fits || outputSize < 1 || featureSize < 0) {
            refuse("$where has a size or chunk that no runner could follow; export again")
        }
        states = content["states"].asJsonArray.map { readState(it.asJsonObject, where) }
        for ((name, variant) in content["variants"].asJsonObject.entrySet()) {
            val file = variant.asJsonObject["file"].asString
            if (!variant.asJsonObject["files"].asJsonObject.has(file)) {
                refuse("$where: the graph of variant $name is not among its files; export again")
            }
        }
    }

    /** Whether the model reads measurements and not token ids. */
    val readsFeatures: Boolean get() = featureSize > 0

    /** The part that the graph carries too. */
    internal fun ioPart(): JsonObject {
        val keys = listOf("format", "input", "output", "num_logits_to_keep", "lengths", "max_time", "states", "profile")
        val part = JsonObject()
        for (key in keys) if (content.has(key)) part.add(key, content[key])
        return part
    }

    /** A variant by name; null: the default one. */
    internal fun variant(name: String?): Pair<String, JsonObject> {
        val wanted = name ?: content["default_variant"].asString
        val variants = content["variants"].asJsonObject
        val found = variants[wanted]?.asJsonObject
            ?: refuse("the bundle has no variant $wanted; it has: ${variants.keySet().joinToString()}")
        return wanted to found
    }

    companion object {
        /** Reads and checks `edgelin.json` of a bundle folder. */
        fun read(folder: File): Manifest {
            val file = File(folder, "edgelin.json")
            if (!file.isFile) {
                refuse("$folder is no bundle: it has no edgelin.json; give a folder written by `edgelin export`")
            }
            val content = parseJson(readText(file), file.path) as? JsonObject
                ?: refuse("$file is not a JSON object; export the bundle again")
            if (content["format"] != JsonPrimitive(1)) {
                refuse("$file has another format than 1; export again, or take a newer runner")
            }
            val rest = content.deepCopy().apply { remove("digest") }
            if (content["digest"]?.takeIf { it.isJsonPrimitive }?.asString != sha256(canonicalJson(rest).toByteArray())) {
                refuse("$file was changed after export: its digest differs; take the original")
            }
            try {
                return Manifest(content, file.path)
            } catch (error: RuntimeException) { // a key is missing, or of another type
                if (error is EdgelinException) throw error
                refuse("$file is not a valid manifest: $error; export again", error)
            }
        }

        private fun readState(entry: JsonObject, where: String): State {
            val dtype = entry["dtype"].asString
            val shape = entry["shape"].asJsonArray.map {
                if (it == JsonPrimitive("batch")) 0L else if (it == JsonPrimitive("past")) -1L else it.asLong
            }
            val state = State(
                entry["name"].asString, entry["input"].asString, entry["output"].asString, entry["kind"].asString,
                shape.drop(1).toLongArray(), dtype == "float32", entry["initial"].asDouble,
            )
            val known = state.isFloat || (dtype == "int64" && !state.grows)
            if (!known || shape[0] != 0L || state.shape.any { it < -1 || it == 0L }) {
                refuse("$where: state ${state.name} has a type or shape that no runner could follow")
            }
            return state
        }
    }
}

/** Parsed JSON. */
internal fun parseJson(text: String, where: String): JsonElement =
    try {
        JsonParser.parseString(text).also { if (deeperThan(it, DEEPEST)) throw StackOverflowError() }
    } catch (error: JsonParseException) {
        refuse("$where is not valid JSON (${error.message}); take the original", error)
    } catch (error: StackOverflowError) {
        refuse("$where is nested too deeply; take the original", error)
    }

/** Whether lists and objects are nested so deeply that nothing recursive should be done with them. */
private fun deeperThan(value: JsonElement, limit: Int): Boolean = when {
    limit == 0 -> true
    value.isJsonArray -> value.asJsonArray.any { deeperThan(it, limit - 1) }
    value.isJsonObject -> value.asJsonObject.entrySet().any { deeperThan(it.value, limit - 1) }
    else -> false
}

/** JSON in one spelling (RFC 8785). */
internal fun canonicalJson(value: JsonElement): String = when {
    value.isJsonObject -> value.asJsonObject.entrySet().sortedBy { it.key }
        .joinToString(",", "{", "}") { "${JsonPrimitive(it.key).quoted()}:${canonicalJson(it.value)}" }
    value.isJsonArray -> value.asJsonArray.joinToString(",", "[", "]") { canonicalJson(it) }
    value.isJsonPrimitive && value.asJsonPrimitive.isString -> value.asJsonPrimitive.quoted()
    value.isJsonPrimitive && value.asJsonPrimitive.isNumber -> canonicalNumber(value.asString)
    else -> value.toString() // true, false, null
}

/** A JSON string with no more escapes than it needs. */
private fun JsonPrimitive.quoted(): String = buildString {
    append('"')
    for (character in asString) {
        when {
            character == '"' || character == '\\' -> append('\\').append(character)
            character == '\b' -> append("\\b")
            character == '\u000c' -> append("\\f")
            character == '\n' -> append("\\n")
            character == '\r' -> append("\\r")
            character == '\t' -> append("\\t")
            character < ' ' -> append("\\u%04x".format(character.code))
            else -> append(character)
        }
    }
    append('"')
}

/** A number as ECMAScript prints it: the fewest digits that read back as the same double. */
private fun canonicalNumber(text: String): String {
    if (text.none { it in ".eE" }) return text
    val value = text.toDouble()
    if (value == 0.0) return "0"
    val exact = BigDecimal(value)
    val shortest = (1..17).map { exact.round(MathContext(it, RoundingMode.HALF_EVEN)) }.first { it.toDouble() == value }
    val size = Math.abs(value)
    if (size >= 1e-6 && size < 1e21) return shortest.stripTrailingZeros().toPlainString()
    val digits = shortest.stripTrailingZeros().unscaledValue().toString()
    val sign = if (value < 0) "-" else ""
    val mantissa = digits.removePrefix("-")
    val exponent = shortest.precision() - shortest.scale() - 1
    val fraction = if (mantissa.length > 1) "." + mantissa.drop(1) else ""
    return "$sign${mantissa[0]}${fraction}e${if (exponent < 0) "" else "+"}$exponent"
}

/** A path that the manifest names, which must lie in the bundle. */
internal fun inside(folder: File, name: String): File {
    if (File(name).isAbsolute || ".." in name.split('/') || '\\' in name) {
        refuse("the manifest names $name, which lies outside the bundle; export again")
    }
    return File(folder, name)
}

/** Compares size and, of a file that is not too large, hash with the manifest's record. */
internal fun checkFile(file: File, record: JsonObject) {
    val todo = "take the original, or export again"
    if (!file.isFile) refuse("$file is missing; $todo")
    if (file.length() != record["bytes"].asLong) refuse("$file has another size than in the manifest; $todo")
    if (file.length() > HASH_LIMIT) return
    val hash = MessageDigest.getInstance("SHA-256")
    file.inputStream().use { stream ->
        val block = ByteArray(1 shl 20)
        while (true) {
            val count = stream.read(block)
            if (count < 0) break
            hash.update(block, 0, count)
        }
    }
    if (hash.digest().hex() != record["sha256"].asString) refuse("$file differs from its sha256 in the manifest; $todo")
}

internal fun readText(file: File): String =
    try {
        file.readText()
    } catch (error: IOException) {
        refuse("$file cannot be read: ${error.message}", error)
    }

internal fun sha256(bytes: ByteArray): String = MessageDigest.getInstance("SHA-256").digest(bytes).hex()

internal fun ByteArray.hex(): String = joinToString("") { "%02x".format(it) }

private const val DEEPEST = 100
private const val HASH_LIMIT = 256L shl 20 // larger files are compared by size
