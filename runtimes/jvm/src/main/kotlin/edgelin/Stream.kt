package edgelin

import ai.onnxruntime.OrtException
import java.io.File

/** One conversation with a model, or one stream of features; made by [Bundle.stream], used by one thread at a time. */
class Stream internal constructor(private val bundle: Bundle, capsule: Saved?) : AutoCloseable {
    private val manifest = bundle.manifest
    private val buffers = Buffers(bundle, bundle.inPlace)
    private val recent = ArrayDeque<Int>()
    private var tail = Tail()
    private var broken = false
    private var start: Snapshot

    /** Tokens or steps read so far. */
    var position: Long = 0
        private set

    /** Answers after the last step: logits, or outputs of a model of features; null before the first. */
    var outputs: FloatArray? = null
        private set

    init {
        if (capsule != null) restore(capsule)
        start = snapshot()
    }

    /** Bytes of the states now. */
    val stateBytes: Long get() = buffers.bytes

    /**
     * Reads token ids, a chunk a call; if one fails, nothing changes.
     *
     * @return answers after the last one
     */
    fun feed(ids: IntArray): FloatArray {
        if (manifest.readsFeatures) refuse("this model reads features, not token ids")
        if (ids.isEmpty()) refuse("there is nothing to read; give at least one token")
        ids.firstOrNull { it < 0 || it >= manifest.outputSize }?.let {
            refuse("token id $it is out of range; the model knows 0 .. ${manifest.outputSize - 1}")
        }
        advance(ids.size) { from, to -> callTokens(ids.copyOfRange(from, to)) }
        return outputs!!.copyOf()
    }

    /** The same of features [time, feature size], flat. */
    fun feed(features: FloatArray): FloatArray {
        val size = manifest.featureSize
        if (!manifest.readsFeatures) refuse("this model reads token ids, not features")
        if (features.isEmpty() || features.size % size != 0) {
            refuse("${features.size} numbers came; a multiple of $size, above 0, is needed")
        }
        features.firstOrNull { !it.isFinite() }?.let { refuse("a feature is $it; finite numbers are needed: leave its step out") }
        advance(features.size / size) { from, to ->
            note(buffers.run(null, features.copyOfRange(from * size, to * size)), to - from)
        }
        return outputs!!.copyOf()
    }

    /** The next token, not yet fed. */
    fun choose(sampling: Sampling): Int {
        if (manifest.readsFeatures) refuse("this model reads features and writes no text")
        val logits = outputs ?: refuse("the stream has read nothing; feed at least one token")
        return choose(logits, recent, position, sampling)
    }

    /**
     * Reads a prompt and writes on; see "A text" in runtimes/README.md.
     *
     * The state then stands behind the last token that was taken from the sequence (before an end
     * token). Text that is not certain yet waits for the next call; [flush] gives it up.
     *
     * @param prompt null goes on where the stream stands
     * @return one piece of text a token, perhaps an empty one
     */
    fun generate(prompt: String?, sampling: Sampling = Sampling()): Sequence<String> {
        val tokenizer = bundle.tokenizer
        val ids = prompt?.let { tokenizer.encode(it, position == 0L) }
        if (ids?.isEmpty() ?: (outputs == null)) refuse("the prompt is empty; give at least one token to go on from")
        return sequence {
            if (ids != null) {
                tail = Tail()
                feed(ids)
            }
            val decoder = TextDecoder(tail, sampling.stop)
            for (count in 0 until sampling.maxTokens) {
                val token = choose(sampling)
                if (token in manifest.ends) {
                    yield(flush())
                    break
                }
                feed(intArrayOf(token))
                yield(decoder.push(tokenizer.bytes(token)))
                if (decoder.stopped) break
            }
        }
    }

    /** Text that was held back, with U+FFFD for an incomplete character. */
    fun flush(): String = tail.flush()

    /** Goes back to where the stream began. */
    fun reset() {
        put(start)
        broken = false
    }

    /** A second stream in the same state. */
    fun fork(): Stream = Stream(bundle, null).also { other ->
        other.start = start
        other.put(snapshot())
        other.broken = broken
    }

    /** Writes a state file, which any runner goes on from. */
    fun save(file: File) = saved().write(file)

    /**
     * Goes to the state in a file.
     *
     * @return whether the same variant saved it; the numbers of another one may differ a little
     */
    fun load(file: File): Boolean {
        val saved = Saved.read(file)
        try {
            restore(saved)
        } catch (error: RuntimeException) {
            refuse("$file does not fit: ${error.message}", error)
        }
        return saved.metadata["variant"] == bundle.variant
    }

    /** The content of a state file. */
    fun saved(): Saved {
        refuseBroken()
        val answers = outputs
        if (answers == null) refuse("the stream has read nothing yet, so there is no state to save")
        val text = if (manifest.readsFeatures) emptyMap() else mapOf("recent" to recentJson(recent), "text" to tail.json())
        val metadata = mapOf(
            "edgelin_state" to "1", "model_hash" to manifest.modelHash, "variant" to bundle.variant,
            "position" to position.toString(),
        )
        val shape = longArrayOf(1, manifest.outputSize.toLong())
        val tensors = manifest.states.map { it.name }.zip(buffers.get()).toMap() + (manifest.output to Numbers(shape, answers, null))
        for ((name, numbers) in tensors) {
            if (!numbers.finite()) refuse("$name is not finite, so the stream cannot be saved; reset it")
        }
        return Saved(metadata + text, tensors)
    }

    /** Goes to a saved stream. */
    internal fun restore(saved: Saved) {
        val metadata = saved.metadata
        if (metadata["model_hash"] != manifest.modelHash) refuse("it was saved by another model")
        val position = metadata["position"]?.takeIf { Regex("[1-9][0-9]{0,18}").matches(it) }?.toLongOrNull()
            ?: refuse("its position is no number from 1 on")
        if (manifest.readsFeatures == ("text" in metadata)) refuse("it is not of this kind of input")
        val ids = if (manifest.readsFeatures) emptyList() else recentIds(metadata["recent"] ?: "", position)
        val text = metadata["text"]?.let { Tail.of(it) } ?: Tail()
        val states = manifest.states.map { state ->
            val found = tensor(saved, state.name, state.sized(position), state.isFloat)
            if (state.kind == "position" && found.longs!!.any { it != position }) refuse("its positions disagree")
            found
        }
        val answers = tensor(saved, manifest.output, longArrayOf(1, manifest.outputSize.toLong()), true)
        if (saved.tensors.size != states.size + 1) refuse("it holds tensors that this model does not have")
        put(Snapshot(states, position, ids, answers.floats, text))
        broken = false
    }

    override fun close() = buffers.close()

    private class Snapshot(
        val states: List<Numbers>,
        val position: Long,
        val recent: List<Int>,
        val outputs: FloatArray?,
        val tail: Tail,
    )

    private fun snapshot() = Snapshot(buffers.get(), position, recent.toList(), outputs, tail.copy())

    private fun put(snapshot: Snapshot) {
        buffers.put(snapshot.states)
        position = snapshot.position
        recent.clear()
        recent.addAll(snapshot.recent)
        outputs = snapshot.outputs
        tail = snapshot.tail.copy()
    }

    private fun recentIds(text: String, position: Long): List<Int> {
        val wanted = minOf(position, WINDOW.toLong()).toInt()
        val list = parseJson(text, "its recent tokens") as? com.google.gson.JsonArray
        val ids = list?.map { it.asBigDecimal.intValueExact() }
        if (ids == null || ids.size != wanted || ids.any { it < 0 || it >= manifest.outputSize }) {
            refuse("its recent tokens are not the last $wanted")
        }
        return ids
    }

    private fun tensor(saved: Saved, name: String, shape: LongArray, isFloat: Boolean): Numbers {
        val found = saved.tensors[name]
        if (found == null || !found.shape.contentEquals(shape) || (found.floats != null) != isFloat || !found.finite()) {
            refuse("tensor $name is missing, of another batch size than 1 or damaged")
        }
        return found
    }

    private fun refuseBroken() {
        if (broken) refuse("the last step failed and its state is lost; reset the stream or load one")
    }

    /** Makes a call for every chunk of the steps. */
    private fun advance(time: Int, call: (Int, Int) -> Unit) {
        refuseBroken()
        val before = if (time > 1 || !bundle.inPlace) snapshot() else null // one step in place is not copied first
        try {
            for (from in 0 until time step manifest.chunk) call(from, minOf(from + manifest.chunk, time))
        } catch (error: Exception) {
            if (before != null) put(before)
            broken = before == null
            if (error is OrtException) refuse("onnxruntime failed: ${error.message}", error)
            throw error
        }
    }

    private fun callTokens(ids: IntArray) {
        note(buffers.run(LongArray(ids.size) { ids[it].toLong() }, null), ids.size)
        recent.addAll(ids.toList())
        while (recent.size > WINDOW) recent.removeFirst()
    }

    /** What the stream knows after a call. */
    private fun note(answers: FloatArray, time: Int) {
        if (answers.any { !it.isFinite() }) {
            refuse(
                "the model's outputs are not finite after position $position: the inputs are too large, " +
                    "or its states or weights are damaged",
            )
        }
        outputs = answers
        position += time
    }

    private companion object {
        const val WINDOW = 64 // tokens that the repetition penalty looks back
    }
}
