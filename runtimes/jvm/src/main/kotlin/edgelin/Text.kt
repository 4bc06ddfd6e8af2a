package edgelin

import com.google.gson.JsonObject

/** What a stream has generated but not yet shown: bytes of an incomplete character, held text. */
internal class Tail(var pending: ByteArray = ByteArray(0), var held: String = "") {

    /** Gives up what is held, with U+FFFD for a character that will not be completed. */
    fun flush(): String {
        val text = held + if (pending.isEmpty()) "" else "\uFFFD"
        pending = ByteArray(0)
        held = ""
        return text
    }

    fun copy(): Tail = Tail(pending, held)

    fun json(): String = JsonObject().apply {
        addProperty("pending", pending.hex())
        addProperty("held", held)
    }.toString()

    companion object {
        fun of(json: String): Tail {
            val content = parseJson(json, "text of the state").asJsonObject
            val pending = content["pending"].asString.chunked(2).map { it.toInt(16).toByte() }.toByteArray()
            return Tail(pending, content["held"].asString)
        }
    }
}

/** Turns the bytes of generated tokens into text that can be shown at once. */
internal class TextDecoder(private val tail: Tail, private val stop: List<String>) {
    var stopped = false
        private set

    /** Takes the bytes of one token; returns the text that is certain now, perhaps none. */
    fun push(bytes: ByteArray): String {
        val text = tail.held + decode(tail.pending + bytes)
        val cut = stop.map { text.indexOf(it) }.filter { it >= 0 }.minOrNull()
        if (cut != null) {
            stopped = true
            tail.flush()
            return text.substring(0, cut)
        }
        val keep = stop.maxOfOrNull { beginning(text, it) } ?: 0
        tail.held = text.substring(text.length - keep)
        return text.substring(0, text.length - keep)
    }

    /**
     * The characters of some bytes; the beginning of one at their end becomes pending.
     *
     * A longest beginning of a character that does not go on is one U+FFFD (Unicode 16, section 3.9).
     * The decoders of JVMs and of Android differ in that.
     */
    private fun decode(bytes: ByteArray): String {
        val text = StringBuilder()
        var at = 0
        while (at < bytes.size) {
            val lead = bytes[at].toInt() and 255
            val size = when (lead) {
                in 0..0x7F -> 1
                in 0xC2..0xDF -> 2
                in 0xE0..0xEF -> 3
                in 0xF0..0xF4 -> 4
                else -> 0
            }
            var end = at + 1
            while (end < at + size && end < bytes.size && continues(lead, end - at, bytes[end].toInt() and 255)) end++
            when {
                end == at + size -> text.append(String(bytes, at, size, Charsets.UTF_8))
                size > 0 && end == bytes.size -> break
                else -> text.append('\uFFFD')
            }
            at = end
        }
        tail.pending = bytes.copyOfRange(at, bytes.size)
        return text.toString()
    }

    private fun continues(lead: Int, index: Int, byte: Int): Boolean = when {
        index > 1 -> byte in 0x80..0xBF
        lead == 0xE0 -> byte in 0xA0..0xBF
        lead == 0xED -> byte in 0x80..0x9F
        lead == 0xF0 -> byte in 0x90..0xBF
        lead == 0xF4 -> byte in 0x80..0x8F
        else -> byte in 0x80..0xBF
    }

    /** Length of the longest end of [text] with which [stop] could begin. */
    private fun beginning(text: String, stop: String): Int =
        (minOf(stop.length - 1, text.length) downTo 1).firstOrNull { text.endsWith(stop.substring(0, it)) } ?: 0
}
