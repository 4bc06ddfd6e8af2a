package edgelin.demo

import android.app.Application
import android.system.Os

/** Holds what outlives a rotated or recreated activity: the stream and its thread. */
class DemoApplication : Application() {
    /** The one writer of the process. */
    lateinit var writer: Writer
        private set

    override fun onCreate() {
        super.onCreate()
        // onnxruntime reports usage unless this stands before its library is loaded.
        Os.setenv("ORT_DISABLE_TELEMETRY", "1", true)
        writer = Writer(this)
    }
}
