package edgelin

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.LongBuffer

/** A tensor in memory that onnxruntime reads and writes without a copy. */
internal class Direct(environment: OrtEnvironment, val shape: LongArray, isFloat: Boolean) : AutoCloseable {
    private val memory: ByteBuffer = ByteBuffer
        .allocateDirect(shape.fold(if (isFloat) 4L else 8L) { size, axis -> size * axis }.toInt())
        .order(ByteOrder.nativeOrder())
    val floats: FloatBuffer? = if (isFloat) memory.asFloatBuffer() else null
    val longs: LongBuffer? = if (isFloat) null else memory.asLongBuffer()
    val value: OnnxTensor =
        if (isFloat) OnnxTensor.createTensor(environment, floats, shape) else OnnxTensor.createTensor(environment, longs, shape)

    fun put(numbers: Numbers) {
        floats?.duplicate()?.put(numbers.floats!!)
        longs?.duplicate()?.put(numbers.longs!!)
    }

    fun get(): Numbers = Numbers(
        shape,
        floats?.let { buffer -> FloatArray(buffer.capacity()).also { buffer.duplicate().get(it) } },
        longs?.let { buffer -> LongArray(buffer.capacity()).also { buffer.duplicate().get(it) } },
    )

    override fun close() = value.close()
}

/**
 * The state tensors of a stream in two sets that take turns as input and output of a call.
 *
 * In place, both sets share the float32 tensors of fixed shape; int64 states always take turns: many
 * nodes read them, some after the new value is written. A state that grows is what onnxruntime gave
 * for it; the result of a call stays open until the next call has run.
 *
 * onnxruntime's Java API refuses inputs that have a default, so that `num_logits_to_keep` stays 1 and
 * there are no `lengths`: a call has one row, and gives the answers after its last step.
 */
internal class Buffers(private val bundle: Bundle, inPlace: Boolean) : AutoCloseable {
    private val environment = bundle.environment
    private val manifest = bundle.manifest
    private val states = manifest.states
    private val fixed = Array(2) { arrayOfNulls<Direct>(states.size) }
    private val grown = arrayOfNulls<OnnxTensor>(states.size)
    private val steps = HashMap<Int, Direct>()
    private val answers = Direct(environment, longArrayOf(1, 1, manifest.outputSize.toLong()), true)
    private var result: OrtSession.Result? = null
    private var turn = 0

    init {
        for ((i, state) in states.withIndex()) {
            if (state.grows) continue
            fixed[0][i] = Direct(environment, state.sized(0), state.isFloat)
            fixed[1][i] =
                if (inPlace && state.isFloat) fixed[0][i] else Direct(environment, state.sized(0), state.isFloat)
        }
        put(states.map { initial(it) })
    }

    /** A state before the first step. */
    fun initial(state: State): Numbers {
        val shape = state.sized(0)
        val size = shape.fold(1L) { product, axis -> product * axis }.toInt()
        return if (state.isFloat) Numbers(shape, FloatArray(size) { state.initial.toFloat() }, null)
        else Numbers(shape, null, LongArray(size) { state.initial.toLong() })
    }

    /** Copies of the states, in the order of the manifest. */
    fun get(): List<Numbers> = states.indices.map { i ->
        fixed[turn][i]?.get() ?: grown[i]!!.let { tensor ->
            val shape = tensor.info.shape
            val size = shape.fold(1L) { product, axis -> product * axis }.toInt()
            Numbers(shape, FloatArray(size).also { if (size > 0) tensor.floatBuffer.get(it) }, null)
        }
    }

    fun put(numbers: List<Numbers>) {
        val old = grown.copyOf()
        for ((i, value) in numbers.withIndex()) {
            fixed[turn][i]?.put(value)
            if (states[i].grows) grown[i] = Direct(environment, value.shape, true).apply { put(value) }.value
        }
        if (result == null) old.forEach { it?.close() } // else the result owns them
        result?.close()
        result = null
    }

    /** Bytes of the states now. */
    val bytes: Long
        get() = states.indices.sumOf { i ->
            val shape = fixed[turn][i]?.shape ?: grown[i]!!.info.shape
            shape.fold(if (states[i].isFloat) 4L else 8L) { size, axis -> size * axis }
        }

    /** Feeds steps of one chunk at most, ids [time] or features [time, size]; answers after the last. */
    fun run(ids: LongArray?, features: FloatArray?): FloatArray {
        val time = ids?.size ?: (features!!.size / manifest.featureSize)
        val input = steps.getOrPut(time) {
            val shape = longArrayOf(1, time.toLong())
            if (ids != null) Direct(environment, shape, false)
            else Direct(environment, shape + manifest.featureSize.toLong(), true)
        }
        if (ids != null) input.longs!!.duplicate().put(ids) else input.floats!!.duplicate().put(features!!)
        call(input)
        return answers.get().floats!!
    }

    private fun call(input: Direct) {
        val given = HashMap<String, OnnxTensor>()
        val pinned = HashMap<String, OnnxTensor>()
        val requested = LinkedHashSet<String>()
        given[manifest.input] = input.value
        pinned[manifest.output] = answers.value
        for ((i, state) in states.withIndex()) {
            given[state.input] = fixed[turn][i]?.value ?: grown[i]!!
            val target = fixed[1 - turn][i]
            if (target != null) pinned[state.output] = target.value else requested.add(state.output)
        }
        val next = bundle.session.run(given, requested, pinned)
        for ((i, state) in states.withIndex()) {
            if (!state.grows) continue
            if (result == null) grown[i]!!.close()
            grown[i] = next.get(state.output).get() as OnnxTensor
        }
        result?.close()
        result = next
        turn = 1 - turn
    }

    override fun close() {
        if (result == null) grown.forEach { it?.close() }
        result?.close()
        for (i in states.indices) {
            fixed[0][i]?.close()
            if (fixed[1][i] !== fixed[0][i]) fixed[1][i]?.close()
        }
        steps.values.forEach { it.close() }
        answers.close()
    }
}
