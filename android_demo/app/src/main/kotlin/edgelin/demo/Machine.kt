package edgelin.demo

import android.content.Context
import android.os.PowerManager
import android.system.Os
import android.system.OsConstants
import java.io.File
import java.io.IOException

/** What the app needs to know of the phone. */
object Machine {

    /**
     * Threads for onnxruntime: at most two, on a phone with two fast cores.
     *
     * A step reads every weight once, and two fast cores use up the memory's speed; more of them, or
     * slow ones that the fast ones wait for, only make heat, and a hot phone slows all cores down. One
     * where the user saves power.
     */
    fun threads(context: Context): Int {
        val power = context.getSystemService(Context.POWER_SERVICE) as PowerManager
        val speeds = (0 until Runtime.getRuntime().availableProcessors()).map { speed(it) }
        val fast = speeds.count { it > (speeds.minOrNull() ?: 0L) || speeds.distinct().size == 1 }
        return if (power.isPowerSaveMode) 1 else fast.coerceIn(1, 2)
    }

    /** Resident memory of the process in bytes. */
    fun memory(): Long =
        try {
            File("/proc/self/statm").readText().split(' ')[1].toLong() * Os.sysconf(OsConstants._SC_PAGESIZE)
        } catch (error: IOException) {
            0
        }

    /** Largest frequency of a core in kHz; 0: unknown. */
    private fun speed(core: Int): Long =
        try {
            File("/sys/devices/system/cpu/cpu$core/cpufreq/cpuinfo_max_freq").readText().trim().toLong()
        } catch (error: IOException) {
            0
        } catch (error: NumberFormatException) {
            0
        }
}
