package edgelin

import com.google.gson.JsonArray
import com.google.gson.JsonObject
import com.google.gson.JsonPrimitive
import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest

/** Numbers of a tensor on the heap: float32 or int64, one of the arrays is null. */
class Numbers(val shape: LongArray, val floats: FloatArray?, val longs: LongArray?) {
    val bytes: Int get() = (floats?.size ?: 0) * 4 + (longs?.size ?: 0) * 8

    fun finite(): Boolean = floats == null || floats.all { it.isFinite() }

    internal fun littleEndian(): ByteArray {
        val buffer = ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN)
        floats?.let { buffer.asFloatBuffer().put(it) }
        longs?.let { buffer.asLongBuffer().put(it) }
        return buffer.array()
    }
}

/** Content of a state file: see "A state file" in runtimes/README.md. */
class Saved(val metadata: Map<String, String>, val tensors: Map<String, Numbers>) {

    /** Writes the file; an older one stays whole until the new one is complete. */
    fun write(file: File) {
        val sorted = tensors.toSortedMap(codePoints)
        val content = sorted.mapValues { it.value.littleEndian() }
        val header = JsonObject()
        val all = metadata + ("sha256" to contentHash(metadata, content))
        header.add("__metadata__", JsonObject().apply { all.forEach { (key, value) -> addProperty(key, value) } })
        val names = sorted.keys.sortedBy { sorted.getValue(it).longs == null } // int64 first: all stay aligned
        var at = 0L
        for (name in names) {
            val numbers = sorted.getValue(name)
            val end = at + numbers.bytes
            header.add(name, JsonObject().apply {
                addProperty("dtype", if (numbers.floats != null) "F32" else "I64")
                add("shape", JsonArray().apply { numbers.shape.forEach { add(it) } })
                add("data_offsets", JsonArray().apply { add(at); add(end) })
            })
            at = end
        }
        var text = header.toString().toByteArray()
        text += ByteArray((8 - text.size % 8) % 8) { ' '.code.toByte() }
        val length = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(text.size.toLong()).array()
        replace(file, listOf(length, text) + names.map { content.getValue(it) })
    }

    companion object {
        /** Reads and checks a state file. */
        fun read(file: File): Saved {
            if (!file.isFile) refuse("there is no state file $file")
            try {
                return parse(file.readBytes())
            } catch (error: Exception) {
                refuse("$file is damaged or no state file: ${error.message ?: error}; save it again", error)
            }
        }

        private fun parse(content: ByteArray): Saved {
            val buffer = ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN)
            require(content.size >= 8) { "it is too short" }
            val length = buffer.getLong(0)
            require(length >= 0 && length <= content.size - 8) { "its header is too long" }
            val header = parseJson(String(content, 8, length.toInt()), "its header").asJsonObject
            val metadata = header["__metadata__"].asJsonObject.entrySet().associate { it.key to it.value.asString }
            require(metadata["edgelin_state"] == "1") { "its format is not 1" }
            val start = 8 + length.toInt()
            val stored = header.entrySet().filter { it.key != "__metadata__" }
                .associate { it.key to Stored.of(it.value.asJsonObject, content, start) }.toSortedMap(codePoints)
            require(stored.values.sumOf { it.data.size.toLong() } == (content.size - start).toLong()) {
                "its length differs from its tensors'"
            }
            require(metadata["sha256"] == contentHash(metadata, stored.mapValues { it.value.data })) {
                "its content differs from its hash"
            }
            val tensors = stored.filterKeys { stored[it.removeSuffix(SCALE)]?.dtype != "I8" || !it.endsWith(SCALE) }
            return Saved(metadata, tensors.mapValues { (name, tensor) -> tensor.numbers(stored[name + SCALE]) })
        }
    }
}

private const val SCALE = ".scale"
private val WIDTHS = mapOf("F32" to 4, "I64" to 8, "F16" to 2, "I8" to 1)
private val codePoints = compareBy<String, ByteArray>({ a, b -> compareBytes(a, b) }) { it.toByteArray() }

private fun compareBytes(one: ByteArray, two: ByteArray): Int {
    for (i in 0 until minOf(one.size, two.size)) if (one[i] != two[i]) return one[i].toUByte().compareTo(two[i].toUByte())
    return one.size.compareTo(two.size)
}

/** One tensor as the file has it. */
private class Stored(val dtype: String, val shape: LongArray, val data: ByteArray) {

    /** The tensor as it steps: float32 or int64. */
    fun numbers(scale: Stored?): Numbers {
        val buffer = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)
        if (dtype == "I64") return Numbers(shape, null, LongArray(data.size / 8).also { buffer.asLongBuffer().get(it) })
        if (dtype == "F32") return Numbers(shape, FloatArray(data.size / 4).also { buffer.asFloatBuffer().get(it) }, null)
        if (dtype == "F16") return Numbers(shape, FloatArray(data.size / 2) { half(buffer.getShort(2 * it).toInt()) }, null)
        val rows = shape.copyOf().also { if (it.isNotEmpty()) it[it.size - 1] = 1 }
        require(scale != null && shape.isNotEmpty() && scale.dtype == "F32" && scale.shape.contentEquals(rows)) {
            "a tensor has no scales"
        }
        val scales = scale.numbers(null).floats!!
        val width = shape.last().toInt()
        return Numbers(shape, FloatArray(data.size) { data[it].toFloat() * scales[it / width] }, null)
    }

    companion object {
        fun of(entry: JsonObject, content: ByteArray, start: Int): Stored {
            val dtype = entry["dtype"].asString
            val width = requireNotNull(WIDTHS[dtype]) { "a tensor is $dtype" }
            val shape = entry["shape"].asJsonArray.map { it.asLong }.toLongArray()
            val (from, to) = entry["data_offsets"].asJsonArray.map { it.asLong }
            var count = 1L
            for (size in shape) {
                require(size >= 0 && (size == 0L || count <= content.size / size)) { "a shape is too large" }
                count *= size
            }
            require(from >= 0 && to >= from && to <= content.size - start && to - from == count * width) {
                "a tensor lies outside the file"
            }
            return Stored(dtype, shape, content.copyOfRange(start + from.toInt(), start + to.toInt()))
        }

        private fun half(bits: Int): Float {
            val exponent = (bits shr 10) and 31
            val fraction = bits and 1023
            val sign = if (bits and 0x8000 != 0) -1f else 1f
            return when (exponent) {
                31 -> if (fraction != 0) Float.NaN else sign * Float.POSITIVE_INFINITY
                0 -> sign * Math.scalb(fraction.toFloat(), -24)
                else -> sign * Math.scalb((1024 + fraction).toFloat(), exponent - 25)
            }
        }
    }
}

/** sha256 of all metadata but itself, then of the tensors, both by name. */
private fun contentHash(metadata: Map<String, String>, tensors: Map<String, ByteArray>): String {
    val hash = MessageDigest.getInstance("SHA-256")
    for ((key, value) in (metadata - "sha256").toSortedMap(codePoints)) {
        hash.update("$key\u0000$value\u0000".toByteArray())
    }
    for (bytes in tensors.values) hash.update(bytes)
    return hash.digest().hex()
}

/** Writes beside a file and renames. */
internal fun replace(file: File, parts: List<ByteArray>) {
    val part = File(file.path + ".part")
    try {
        FileOutputStream(part).use { stream ->
            parts.forEach { stream.write(it) }
            stream.fd.sync()
        }
        if (!part.renameTo(file)) throw IOException("it cannot be renamed into place")
    } catch (error: IOException) {
        part.delete()
        refuse("$file cannot be written (${error.message}); give a file in a folder that exists and has room", error)
    }
}

internal fun recentJson(ids: Collection<Int>): String = JsonArray().apply { ids.forEach { add(JsonPrimitive(it)) } }.toString()
