import edgelin.Bundle
import edgelin.EdgelinException
import edgelin.Sampling
import java.io.File
import java.io.FileDescriptor
import java.io.FileOutputStream
import java.io.PrintStream
import kotlin.system.exitProcess

/**
 * Writes a text on: RunKt BUNDLE PROMPT [--max-tokens N] [--temperature X] [--seed N] [--variant NAME]
 * [--threads N] [--load-state FILE] [--save-state FILE]. An empty prompt goes on from a loaded state.
 */
fun main(words: Array<String>) {
    System.setOut(PrintStream(FileOutputStream(FileDescriptor.out), true, "UTF-8")) // as every other runner, in any locale
    try {
        run(words)
    } catch (error: EdgelinException) {
        System.err.println("Error: ${error.message}")
        exitProcess(1)
    }
}

private val OPTIONS = setOf("--max-tokens", "--temperature", "--seed", "--variant", "--threads", "--load-state", "--save-state")

private fun <T> number(name: String, text: String?, read: String.() -> T?): T? = text?.let {
    it.read() ?: throw EdgelinException("$name is $it; a number is needed")
}

private fun run(words: Array<String>) {
    if (words.size < 2 || words.size % 2 != 0) throw EdgelinException("give a bundle, a prompt and options with their values")
    words.drop(2).filterIndexed { i, word -> i % 2 == 0 && word !in OPTIONS }.firstOrNull()?.let {
        throw EdgelinException("there is no option $it; there are: ${OPTIONS.joinToString()}")
    }
    val given = words.drop(2).chunked(2).associate { it[0] to it[1] }
    Bundle(File(words[0]), given["--variant"], number("--threads", given["--threads"], String::toIntOrNull) ?: 0).use { bundle ->
        bundle.stream().use { stream ->
            given["--load-state"]?.let { stream.load(File(it)) }
            val sampling = Sampling(
                maxTokens = number("--max-tokens", given["--max-tokens"], String::toIntOrNull) ?: 100,
                temperature = number("--temperature", given["--temperature"], String::toDoubleOrNull) ?: 0.8,
                seed = number("--seed", given["--seed"], String::toULongOrNull) ?: 0u,
            )
            val pieces = stream.generate(words[1].ifEmpty { null }, sampling).iterator()
            if (pieces.hasNext()) print(pieces.next()) // reads the prompt
            val (begin, before) = System.nanoTime() to stream.position
            for (piece in pieces) print(piece).also { System.out.flush() }
            val speed = (stream.position - before) / ((System.nanoTime() - begin) / 1e9)
            val state = given["--save-state"]?.let { stream.saved() } // as it is before the flush
            println(stream.flush())
            state?.write(File(given["--save-state"]!!))
            System.err.println("%.1f tokens/s, state %d bytes at position %d".format(speed, stream.stateBytes, stream.position))
        }
    }
}
