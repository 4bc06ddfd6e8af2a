package edgelin.demo

import android.app.Activity
import android.content.ActivityNotFoundException
import android.content.Intent
import android.os.Bundle
import android.view.View
import android.widget.Button
import android.widget.EditText
import android.widget.ScrollView
import android.widget.TextView

/** The screen: a prompt, the text as it is written, its numbers, and what can be done with its state. */
class MainActivity : Activity(), Writer.Listener {
    private lateinit var writer: Writer
    private lateinit var prompt: EditText
    private lateinit var text: TextView
    private lateinit var numbers: TextView
    private lateinit var scroll: ScrollView
    private lateinit var plot: PlotView
    private lateinit var goOn: Button
    private var writes = false

    override fun onCreate(saved: Bundle?) {
        super.onCreate(saved)
        setContentView(R.layout.main)
        writer = (application as DemoApplication).writer
        prompt = findViewById(R.id.prompt) as EditText
        text = findViewById(R.id.text) as TextView
        numbers = findViewById(R.id.numbers) as TextView
        scroll = findViewById(R.id.scroll) as ScrollView
        plot = findViewById(R.id.plot) as PlotView
        goOn = findViewById(R.id.go_on) as Button
        goOn.setOnClickListener { if (writes) writer.pause() else writer.write(prompt.text.toString()) }
        on(R.id.start_over) { writer.startOver() }
        on(R.id.save) { writer.save(KEPT) }
        on(R.id.restore) { writer.restore(KEPT) }
        on(R.id.pick) { pick() }
        keepClearOfBars()
    }

    override fun onStart() {
        super.onStart()
        writer.listener = this
    }

    override fun onStop() {
        super.onStop()
        writer.listener = null
        if (isChangingConfigurations) return
        writer.pause() // nothing is computed that nobody sees
        writer.save() // Android may kill the process from here on
    }

    override fun onActivityResult(request: Int, result: Int, data: Intent?) {
        super.onActivityResult(request, result, data)
        if (request == PICK && result == RESULT_OK) data?.data?.let { writer.pick(it) }
    }

    override fun text(text: String) {
        this.text.text = text
        prompt.visibility = if (text.isEmpty()) View.VISIBLE else View.GONE
        toEnd()
    }

    override fun piece(piece: String) {
        text.append(piece)
        prompt.visibility = View.GONE
        toEnd()
    }

    override fun status(status: Status) {
        numbers.text = getString(
            R.string.numbers, status.tokensPerSecond, status.position, status.stateBytes / 1e6,
            status.memory / 1_048_576.0, status.threads,
        )
        plot.add(status)
    }

    override fun writing(now: Boolean) {
        writes = now
        goOn.setText(if (now) R.string.pause else R.string.go_on)
    }

    override fun message(message: String?) {
        if (message != null) numbers.text = message
    }

    private fun on(id: Int, action: () -> Unit) {
        val view: View = findViewById(id)
        view.setOnClickListener { action() }
    }

    private fun toEnd() = scroll.post { scroll.fullScroll(View.FOCUS_DOWN) }

    private fun pick() = try {
        startActivityForResult(Intent(Intent.ACTION_OPEN_DOCUMENT_TREE), PICK)
    } catch (error: ActivityNotFoundException) {
        message(error.message)
    }

    /** Since Android 15 a window reaches under the bars of the system. */
    private fun keepClearOfBars() {
        val root: View = findViewById(R.id.root)
        val padding = root.paddingLeft
        root.setOnApplyWindowInsetsListener { view, insets ->
            view.setPadding(
                padding + insets.systemWindowInsetLeft, padding + insets.systemWindowInsetTop,
                padding + insets.systemWindowInsetRight, padding + insets.systemWindowInsetBottom,
            )
            insets
        }
    }

    private companion object {
        const val KEPT = "kept"
        const val PICK = 1
    }
}
