package edgelin.demo

import android.content.Context
import android.net.Uri
import android.os.Handler
import android.os.Looper
import edgelin.Bundle
import edgelin.EdgelinException
import edgelin.Sampling
import edgelin.Stream
import java.io.File
import java.io.IOException
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors

/** How the stream stands. */
data class Status(
    val tokensPerSecond: Double = 0.0,
    val position: Long = 0,
    val stateBytes: Long = 0,
    val memory: Long = 0,
    val stepMillis: Double = 0.0,
    val threads: Int = 0,
)

/**
 * One stream of text and the thread that all of its calls run on.
 *
 * The end of the text and the state file beside it are what is saved: going on from them reads nothing
 * again, so that a process which Android has killed goes on at once.
 */
class Writer(private val context: Context) {

    /** Told of everything on the main thread. */
    interface Listener {
        /** The whole text is another one. */
        fun text(text: String)

        /** A piece was written behind it. */
        fun piece(piece: String)

        fun status(status: Status)

        /** Whether it writes. */
        fun writing(now: Boolean)

        /** Something to tell the user; null: no longer. */
        fun message(message: String?)
    }

    private val main = Handler(Looper.getMainLooper())
    private val thread: ExecutorService = Executors.newSingleThreadExecutor()
    private val files = BundleFiles(context)
    private val threads = Machine.threads(context)
    private val text = StringBuilder() // touched by the thread only, as are the next two
    private var bundle: Bundle? = null
    private var stream: Stream? = null
    private var last = Status()
    private var message: String? = null

    @Volatile
    private var wanted = false

    /** Who is told; set and called on the main thread. */
    var listener: Listener? = null
        set(value) {
            field = value
            if (value != null) run { show() }
        }

    init {
        run { open() }
    }

    /** Continues the text; a prompt is read first where there is no text yet. */
    fun write(prompt: String) {
        if (wanted) return
        wanted = true
        run { writeOn(prompt) }
    }

    /** Stops before the next token. */
    fun pause() {
        wanted = false
    }

    /** Forgets the text. */
    fun startOver() {
        pause()
        run {
            stream?.reset()
            text.setLength(0)
            show()
        }
    }

    /** Keeps how the stream stands under a name; null: for the next start of the app. */
    fun save(name: String? = null) = run {
        val position = stream?.position ?: 0
        if (position > 0L) {
            store(name ?: SESSION)
            if (name != null) tell(context.getString(R.string.saved, position))
        }
    }

    /** Goes back to what was saved under a name. */
    fun restore(name: String) {
        pause()
        run { load(name) }
    }

    /** Opens a bundle of a folder that the user has picked. */
    fun pick(tree: Uri) {
        pause()
        run {
            tell(context.getString(R.string.copying))
            stream?.close()
            bundle?.close()
            stream = null
            bundle = null
            try {
                files.pick(tree)
            } finally {
                open()
            }
        }
    }

    private fun open() {
        tell(context.getString(R.string.opening))
        val folder = files.find()
        if (folder == null) return tell(context.getString(R.string.no_bundle))
        val opened = Bundle(folder, threads = threads, tested = context.filesDir)
        bundle = opened
        stream = opened.stream()
        text.setLength(0)
        tell(null)
        if (File(context.filesDir, "$SESSION.state").isFile) {
            try {
                load(SESSION)
            } catch (error: EdgelinException) {
                stream?.reset() // it was saved by the bundle of before
            }
        }
        show()
    }

    private fun writeOn(prompt: String) {
        val stream = stream ?: return stopped()
        post { it.writing(true) }
        try {
            val first = if (stream.position == 0L) prompt.trim() else null
            if (first != null) add(first)
            var begin = System.nanoTime()
            var count = 0
            for (piece in stream.generate(first, Sampling(maxTokens = Int.MAX_VALUE, seed = SEED))) {
                add(piece)
                val now = System.nanoTime()
                count++
                if (now - begin > REPORT_NANOS) {
                    report(count, now - begin)
                    begin = System.nanoTime()
                    count = 0
                }
                if (!wanted) break
            }
        } finally {
            stopped()
        }
    }

    private fun stopped() {
        wanted = false
        post { it.writing(false) }
    }

    private fun add(piece: String) {
        if (piece.isEmpty()) return
        text.append(piece)
        post { it.piece(piece) }
        if (text.length < 2 * SHOWN) return
        text.delete(0, text.length - SHOWN) // the stream goes on for ever, the screen does not
        val rest = text.toString()
        post { it.text(rest) }
    }

    private fun report(count: Int, nanos: Long) {
        val stream = stream ?: return
        val seconds = nanos / 1e9
        last = Status(count / seconds, stream.position, stream.stateBytes, Machine.memory(), 1000 * seconds / count, threads)
        val status = last
        post { it.status(status) }
    }

    private fun store(name: String) {
        stream?.save(File(context.filesDir, "$name.state"))
        val file = File(context.filesDir, "$name.txt")
        val part = File(file.path + ".part")
        part.writeText(text.toString())
        if (!part.renameTo(file)) throw IOException("$file cannot be written")
    }

    private fun load(name: String) {
        val stream = stream ?: return
        stream.load(File(context.filesDir, "$name.state"))
        text.setLength(0)
        text.append(File(context.filesDir, "$name.txt").readText())
        last = Status(0.0, stream.position, stream.stateBytes, Machine.memory(), 0.0, threads)
        show()
    }

    private fun show() {
        val (all, status, note) = Triple(text.toString(), last, message)
        post {
            it.text(all)
            it.status(status)
            it.message(note)
            it.writing(wanted)
        }
    }

    private fun tell(note: String?) {
        message = note
        post { it.message(note) }
    }

    private fun post(action: (Listener) -> Unit) {
        main.post { listener?.let(action) }
    }

    /** Does something on the thread; what goes wrong is told, not thrown. */
    private fun run(action: () -> Unit) {
        thread.execute {
            try {
                action()
            } catch (error: EdgelinException) {
                tell(error.message)
            } catch (error: IOException) {
                tell(error.message)
            }
        }
    }

    private companion object {
        const val SESSION = "session"
        const val SHOWN = 20_000 // characters of the text that are kept
        const val REPORT_NANOS = 250_000_000L
        val SEED = 1uL
    }
}
