package edgelin

import com.google.gson.Gson
import java.io.File

/*
 * Encodes texts for a comparison with the tokenizers library: EncodeKt JOBS.json, a list of
 * {"tokenizer": file, "texts": [...]}; prints the ids, and the bytes that they stand for as text.
 */
fun main(words: Array<String>) {
    val found = parseJson(File(words[0]).readText(), words[0]).asJsonArray.map { job ->
        val tokenizer = Tokenizer.read(File(job.asJsonObject["tokenizer"].asString), Int.MAX_VALUE)
        job.asJsonObject["texts"].asJsonArray.map { text ->
            val ids = tokenizer.encode(text.asString)
            val decoder = TextDecoder(Tail(), emptyList())
            listOf(ids.toList(), ids.joinToString("") { decoder.push(tokenizer.bytes(it)) })
        }
    }
    println(Gson().toJson(found))
}
