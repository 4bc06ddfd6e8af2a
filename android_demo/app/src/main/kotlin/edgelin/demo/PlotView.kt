package edgelin.demo

import android.content.Context
import android.graphics.Canvas
import android.graphics.Paint
import android.util.AttributeSet
import android.view.View

/** Memory of the process and time of a step against the position in the text; both from zero. */
class PlotView(context: Context, attributes: AttributeSet?) : View(context, attributes) {
    private class Point(val position: Long, val memory: Float, val time: Float)

    private val points = ArrayList<Point>()
    private val memoryPaint = line(R.color.memory)
    private val timePaint = line(R.color.time)

    /** Adds a measurement; one of an earlier position begins anew. */
    fun add(status: Status) {
        if (status.stepMillis <= 0) return
        if (points.isNotEmpty() && status.position <= points.last().position) points.clear()
        points.add(Point(status.position, status.memory / MEGA, status.stepMillis.toFloat()))
        if (points.size > KEPT) { // every other one, so that the whole way stays in the picture
            val half = points.filterIndexed { index, _ -> index % 2 == 0 }
            points.clear()
            points.addAll(half)
        }
        invalidate()
    }

    override fun onDraw(canvas: Canvas) {
        super.onDraw(canvas)
        draw(canvas, memoryPaint, 0f, context.getString(R.string.plot_memory)) { it.memory }
        draw(canvas, timePaint, height / 2f, context.getString(R.string.plot_time)) { it.time }
    }

    private fun draw(canvas: Canvas, paint: Paint, top: Float, name: String, value: (Point) -> Float) {
        val most = points.map(value).maxOrNull() ?: return
        val (first, last) = points.first().position to points.last().position
        val below = top + height / 2f - paint.strokeWidth
        val room = height / 2f - 2 * paint.textSize
        var before: Pair<Float, Float>? = null
        for (point in points) {
            val x = width * (point.position - first).toFloat() / maxOf(1L, last - first)
            val y = below - room * value(point) / most
            before?.let { (x0, y0) -> canvas.drawLine(x0, y0, x, y, paint) }
            before = x to y
        }
        canvas.drawText("%s  %.1f".format(name, value(points.last())), 0f, top + paint.textSize, paint)
    }

    private fun line(color: Int) = Paint(Paint.ANTI_ALIAS_FLAG).apply {
        this.color = context.resources.getColor(color, context.theme)
        strokeWidth = 2 * resources.displayMetrics.density
        textSize = 12 * resources.displayMetrics.scaledDensity
    }

    private companion object {
        const val MEGA = 1_048_576f
        const val KEPT = 400
    }
}
