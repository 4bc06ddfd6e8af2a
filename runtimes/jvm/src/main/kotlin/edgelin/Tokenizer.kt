package edgelin

import com.google.gson.JsonElement
import com.google.gson.JsonObject
import java.io.ByteArrayOutputStream
import java.io.File
import java.text.Normalizer
import java.util.PriorityQueue
import java.util.regex.Pattern

/**
 * A byte-level BPE of Hugging Face's `tokenizer.json`: GPT-2's, Llama 3's, Qwen's, edgelin's own.
 * What the file asks for and is not done here is refused by name.
 */
class Tokenizer private constructor(content: JsonObject) {
    private val vocabulary = HashMap<String, Int>()
    private val ranks = HashMap<Pair<String, String>, Int>()
    private val wholeWords: Boolean
    private val normalize: (String) -> String
    private val split: (String) -> List<String>
    private val added = LinkedHashMap<String, Int>()
    private val addedPattern: Pattern?
    private val prefix = ArrayList<Int>()
    private val suffix = ArrayList<Int>()
    private val bytes = HashMap<Int, ByteArray>()

    init {
        val model = content["model"].asJsonObject
        want(model["type"]?.asString == "BPE", "model", model["type"])
        for (key in listOf("continuing_subword_prefix", "end_of_word_suffix")) {
            want(model.text(key).isNullOrEmpty(), key, model[key])
        }
        wholeWords = model["ignore_merges"]?.asBoolean == true
        for ((token, id) in model["vocab"].asJsonObject.entrySet()) vocabulary[token] = id.asInt
        for ((rank, entry) in model["merges"].asJsonArray.withIndex()) {
            val (left, right) = if (entry.isJsonArray) entry.asJsonArray.map { it.asString } else entry.asString.split(' ')
            ranks[left to right] = rank
        }
        for ((token, id) in vocabulary) bytes[id] = fromSymbols(token)
        for (entry in content["added_tokens"].asJsonArray.map { it.asJsonObject }) {
            val text = entry["content"].asString
            for (key in listOf("single_word", "lstrip", "rstrip")) want(!entry[key].asBoolean, "$key of $text", entry[key])
            added[text] = entry["id"].asInt
            bytes[entry["id"].asInt] = if (entry["special"].asBoolean) ByteArray(0) else text.toByteArray()
        }
        val longest = added.keys.sortedByDescending { it.length }
        addedPattern = if (longest.isEmpty()) null else Pattern.compile(longest.joinToString("|") { Pattern.quote(it) })
        normalize = normalizer(content["normalizer"])
        split = splitter(content["pre_tokenizer"])
        readTemplate(content["post_processor"])
        want(uses(content["decoder"], "ByteLevel"), "decoder", content["decoder"])
    }

    /**
     * Token ids of a text.
     *
     * @param start whether a stream starts here, so that a begin token, if there is one, comes first
     */
    fun encode(text: String, start: Boolean = true): IntArray {
        val ids = ArrayList<Int>()
        if (start) ids.addAll(prefix)
        var at = 0
        val matcher = addedPattern?.matcher(text)
        while (matcher != null && matcher.find()) {
            encodePlain(text.substring(at, matcher.start()), ids)
            ids.add(added.getValue(matcher.group()))
            at = matcher.end()
        }
        encodePlain(text.substring(at), ids)
        if (start) ids.addAll(suffix)
        return ids.toIntArray()
    }

    /** UTF-8 bytes that a reader sees of a token: none for special tokens and unused ids. */
    fun bytes(token: Int): ByteArray = bytes[token] ?: ByteArray(0)

    private fun encodePlain(text: String, ids: MutableList<Int>) {
        if (text.isEmpty()) return
        for (word in split(normalize(text))) {
            val symbols = word.toByteArray().map { SYMBOLS[it.toInt() and 255].toString() }
            val whole = if (wholeWords) vocabulary[symbols.joinToString("")] else null
            if (whole != null) ids.add(whole) else merge(symbols, ids)
        }
    }

    /** Joins neighbours, the pair of the lowest rank first, the leftmost of equals. */
    private fun merge(symbols: List<String>, ids: MutableList<Int>) {
        val parts = symbols.toTypedArray<String?>()
        val next = IntArray(parts.size) { it + 1 }
        val before = IntArray(parts.size) { it - 1 }
        class Candidate(val rank: Int, val at: Int, val left: String, val right: String)
        val queue = PriorityQueue<Candidate>(compareBy({ it.rank }, { it.at }))
        fun offer(at: Int) {
            if (at < 0 || next[at] >= parts.size) return
            val left = parts[at]!!
            val right = parts[next[at]]!!
            ranks[left to right]?.let { queue.add(Candidate(it, at, left, right)) }
        }
        for (i in parts.indices) offer(i)
        while (queue.isNotEmpty()) {
            val best = queue.poll()!!
            val other = next[best.at]
            if (parts[best.at] != best.left || other >= parts.size || parts[other] != best.right) continue // of before
            parts[best.at] = best.left + best.right
            parts[other] = null
            next[best.at] = next[other]
            if (next[other] < parts.size) before[next[other]] = best.at
            offer(before[best.at])
            offer(best.at)
        }
        for (part in parts) if (part != null) vocabulary[part]?.let { ids.add(it) }
    }

    private fun readTemplate(entry: JsonElement?) {
        val content = entry?.takeIf { it.isJsonObject }?.asJsonObject ?: return
        when (content["type"].asString) {
            "ByteLevel" -> return
            "Sequence" -> content["processors"].asJsonArray.forEach { readTemplate(it) }
            "TemplateProcessing" -> {
                val tokens = content["special_tokens"].asJsonObject
                var target = prefix
                for (item in content["single"].asJsonArray.map { it.asJsonObject }) {
                    if (item.has("Sequence")) target = suffix
                    else item["SpecialToken"].asJsonObject["id"].asString.let { name ->
                        tokens[name].asJsonObject["ids"].asJsonArray.forEach { target.add(it.asInt) }
                    }
                }
            }
            else -> want(false, "post_processor", content["type"])
        }
    }

    companion object {
        /** Reads a file, whose ids must lie below the model's vocabulary size. */
        fun read(file: File, vocabularySize: Int): Tokenizer {
            val content = parseJson(readText(file), file.path)
            val tokenizer = try {
                Tokenizer(content.asJsonObject)
            } catch (error: RuntimeException) {
                refuse("$file is not a tokenizer that this runner knows: ${error.message}", error)
            }
            if (tokenizer.bytes.keys.any { it >= vocabularySize }) {
                refuse("$file has ids from $vocabularySize on, which the model does not know; it belongs to another model")
            }
            return tokenizer
        }
    }
}

private fun want(good: Boolean, what: String, found: Any?) {
    if (!good) refuse("$what is $found, which this runner does not do")
}

private fun JsonObject.text(key: String): String? = get(key)?.takeIf { it.isJsonPrimitive }?.asString

/** Whether a decoder is of a kind, or is a sequence with one of it. */
private fun uses(decoder: JsonElement?, kind: String): Boolean {
    val content = decoder?.takeIf { it.isJsonObject }?.asJsonObject ?: return false
    return content.text("type") == kind || content["decoders"]?.asJsonArray?.any { uses(it, kind) } == true
}

private fun normalizer(entry: JsonElement?): (String) -> String {
    val content = entry?.takeIf { it.isJsonObject }?.asJsonObject ?: return { it }
    val type = content["type"].asString
    if (type == "Sequence") {
        val all = content["normalizers"].asJsonArray.map { normalizer(it) }
        return { text -> all.fold(text) { now, one -> one(now) } }
    }
    want(type in setOf("NFC", "NFD", "NFKC", "NFKD"), "normalizer", type)
    val form = Normalizer.Form.valueOf(type)
    return { Normalizer.normalize(it, form) }
}

/** Cuts a text into words, as the pre-tokenizer says. */
private fun splitter(entry: JsonElement?): (String) -> List<String> {
    val content = entry?.takeIf { it.isJsonObject }?.asJsonObject ?: return { listOf(it) }
    return when (val type = content["type"].asString) {
        "Sequence" -> {
            val all = content["pretokenizers"].asJsonArray.map { splitter(it) };
            { text -> all.fold(listOf(text)) { words, one -> words.flatMap(one) } }
        }
        "ByteLevel" -> {
            val space = content["add_prefix_space"]?.asBoolean == true
            val words = if (content["use_regex"]?.asBoolean != false) isolated(GPT2) else { text -> listOf(text) };
            { text -> words(if (space && !text.startsWith(" ")) " $text" else text) }
        }
        "Digits" -> isolated(if (content["individual_digits"].asBoolean) "\\p{N}" else "\\p{N}+")
        "Split" -> {
            val pattern = content["pattern"].asJsonObject
            val regex = pattern.text("Regex") ?: Pattern.quote(pattern["String"].asString)
            val behavior = content["behavior"].asString
            val inverted = content["invert"].asBoolean
            want(behavior == "Isolated" || (behavior == "Removed" && inverted), "behavior of Split", behavior)
            val words = isolated(regex)
            val matches = Pattern.compile(regex.withUnicodeSpaces(), Pattern.UNICODE_CASE)
            if (behavior == "Isolated") words
            else { text -> words(text).filter { matches.matcher(it).matches() } }
        }
        else -> refuse("pre_tokenizer is $type, which this runner does not do")
    }
}

/** Matches of a pattern and what lies between them, in order. */
private fun isolated(regex: String): (String) -> List<String> {
    val pattern = Pattern.compile(regex.withUnicodeSpaces(), Pattern.UNICODE_CASE)
    return { text ->
        val words = ArrayList<String>()
        val matcher = pattern.matcher(text)
        var at = 0
        while (matcher.find()) {
            if (matcher.start() > at) words.add(text.substring(at, matcher.start()))
            if (matcher.end() > matcher.start()) words.add(matcher.group())
            at = matcher.end()
        }
        if (at < text.length) words.add(text.substring(at))
        words
    }
}

/** `\s` of the tokenizers library is every Unicode space, that of the JVM only those of ASCII. */
private fun String.withUnicodeSpaces(): String {
    val found = StringBuilder()
    var depth = 0
    var i = 0
    while (i < length) {
        val escape = if (this[i] == '\\' && i + 1 < length) substring(i, i + 2) else null
        when {
            escape == "\\s" -> found.append(if (depth > 0) SPACES else "[$SPACES]")
            escape == "\\S" -> found.append(if (depth > 0) refuse("\\S in a class") else "[^$SPACES]")
            escape != null -> found.append(escape)
            this[i] == '[' -> found.append('[').also { depth++ }
            this[i] == ']' -> found.append(']').also { depth-- }
            else -> found.append(this[i])
        }
        i += escape?.length ?: 1
    }
    return found.toString()
}

/** Bytes of a token that is spelled with GPT-2's symbols. */
private fun fromSymbols(token: String): ByteArray {
    val bytes = ByteArrayOutputStream()
    for (character in token) BYTES[character]?.let { bytes.write(it) }
    return bytes.toByteArray()
}

// GPT-2, github.com/openai/gpt-2, src/encoder.py: the words, and a printable symbol for every byte.
private const val GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
private const val SPACES = "\\t-\\r \\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
private val SYMBOLS: CharArray = run {
    val printable = (33..126) + (161..172) + (174..255)
    var other = 256
    CharArray(256) { if (it in printable) it.toChar() else (other++).toChar() }
}
private val BYTES: Map<Char, Int> = SYMBOLS.indices.associateBy { SYMBOLS[it] }
