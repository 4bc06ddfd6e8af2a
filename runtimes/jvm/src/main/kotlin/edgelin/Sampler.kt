package edgelin

/**
 * How text is generated; "A text" in runtimes/README.md has the order of the filters.
 *
 * @property maxTokens tokens to generate at most
 * @property temperature divides the logits; 0 takes the likeliest token
 * @property topK keeps the k likeliest; 0 keeps all
 * @property topP keeps the fewest whose probabilities reach it; 1 keeps all
 * @property minP keeps those at least so many times as likely as the likeliest
 * @property repetitionPenalty above 1 makes the last 64 tokens less likely
 * @property seed of the random numbers, which depend on it and the position alone
 * @property stop texts that end the generation and are not part of it
 */
data class Sampling(
    val maxTokens: Int = 256,
    val temperature: Double = 0.8,
    val topK: Int = 40,
    val topP: Double = 0.95,
    val minP: Double = 0.0,
    val repetitionPenalty: Double = 1.0,
    val seed: ULong = 0u,
    val stop: List<String> = emptyList(),
) {
    init {
        need(maxTokens >= 0, "maxTokens", maxTokens, "0 or more")
        need(temperature >= 0 && temperature.isFinite(), "temperature", temperature, "0 or more")
        need(topK >= 0, "topK", topK, "0 (all) or more")
        need(topP > 0 && topP <= 1, "topP", topP, "above 0 and at most 1")
        need(minP >= 0 && minP <= 1, "minP", minP, "0 .. 1")
        need(repetitionPenalty > 0 && repetitionPenalty.isFinite(), "repetitionPenalty", repetitionPenalty, "above 0")
        need(stop.none { it.isEmpty() }, "stop", stop, "texts of one character or more")
    }

    private fun need(good: Boolean, name: String, value: Any, allowed: String) {
        if (!good) refuse("$name is $value; allowed: $allowed")
    }
}

/** The next token from logits, the last tokens, and the number of tokens read so far. */
internal fun choose(logits: FloatArray, recent: Collection<Int>, position: Long, sampling: Sampling): Int {
    val scores = penalised(logits, recent, sampling.repetitionPenalty)
    if (sampling.temperature == 0.0) return largest(scores, 1)[0]
    val scaled = tempered(scores, sampling.temperature)
    val order = largest(scaled, if (sampling.topK > 0) minOf(sampling.topK, scaled.size) else scaled.size)
    val weights = order.map { Math.exp(scaled[it] - scaled[order[0]]) }
    val sum = weights.sum()
    val cumulative = ArrayList<Double>()
    var total = 0.0
    for (weight in weights) {
        val enough = sampling.topP < 1 && total >= sampling.topP
        if (cumulative.isNotEmpty() && (enough || weight / sum < sampling.minP * (weights[0] / sum))) break
        total += weight / sum
        cumulative.add(total)
    }
    val drawn = uniform(sampling.seed, position) * total
    val at = cumulative.indexOfFirst { it > drawn }
    return order[if (at < 0) cumulative.size - 1 else at]
}

/** The [position]-th output of splitmix64 started at [seed], as a number in [0, 1). */
internal fun uniform(seed: ULong, position: Long): Double {
    var z = seed + (position.toULong() + 1u) * 0x9E3779B97F4A7C15u
    z = (z xor (z shr 30)) * 0xBF58476D1CE4E5B9u
    z = (z xor (z shr 27)) * 0x94D049BB133111EBu
    return Math.scalb(((z xor (z shr 31)) shr 11).toLong().toDouble(), -53)
}

/** Indices of the [count] largest scores, downwards, the lower index first. */
private fun largest(scores: DoubleArray, count: Int): List<Int> {
    if (count > INSERTED) return scores.indices.sortedWith(compareBy({ -scores[it] }, { it })).take(count)
    val best = IntArray(count)
    var found = 0
    for (i in scores.indices) {
        if (found == count && scores[i] <= scores[best[count - 1]]) continue
        var at = if (found < count) found++ else count - 1
        while (at > 0 && scores[best[at - 1]] < scores[i]) best[at] = best[--at]
        best[at] = i
    }
    return best.toList()
}

private const val INSERTED = 256 // more are sorted

private fun penalised(logits: FloatArray, recent: Collection<Int>, penalty: Double): DoubleArray {
    val scores = DoubleArray(logits.size) { logits[it].toDouble() }
    if (penalty == 1.0) return scores
    for (id in recent.toSet()) {
        val changed = if (scores[id] > 0) scores[id] / penalty else scores[id] * penalty
        scores[id] = changed.coerceIn(-Double.MAX_VALUE, Double.MAX_VALUE)
    }
    return scores
}

/** Scores divided by the temperature, or their limit for one so small that they overflow. */
private fun tempered(scores: DoubleArray, temperature: Double): DoubleArray {
    val scaled = DoubleArray(scores.size) { scores[it] / temperature }
    if (scaled.all { it.isFinite() }) return scaled
    val highest = scores.max()
    return DoubleArray(scores.size) {
        ((scores[it] - highest) / temperature).coerceIn(-Double.MAX_VALUE, Double.MAX_VALUE)
    }
}
