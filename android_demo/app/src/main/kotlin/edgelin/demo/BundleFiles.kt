package edgelin.demo

import android.content.Context
import android.net.Uri
import android.provider.DocumentsContract
import edgelin.EdgelinException
import java.io.File
import java.io.FileNotFoundException
import java.io.InputStream

/**
 * The bundle as files of the app, so that onnxruntime maps the weights instead of holding them twice.
 *
 * It comes from the assets, or from a folder that the user picks, and is copied beside and renamed: a
 * copy is whole or absent.
 */
class BundleFiles(private val context: Context) {
    private val folder = File(context.filesDir, "bundle")
    private val picked = File(context.filesDir, "picked")

    /** The folder of the picked bundle, else of the one in the assets; null: there is none. */
    fun find(): File? {
        if (picked.isDirectory) return picked
        val newest = try {
            context.assets.open("$ASSETS/$MANIFEST").use { it.readBytes() }
        } catch (error: FileNotFoundException) {
            return folder.takeIf { it.isDirectory }
        }
        val copied = File(folder, MANIFEST)
        if (!copied.isFile || !copied.readBytes().contentEquals(newest)) replace(folder) { copyAssets(ASSETS, it) }
        return folder
    }

    /** Copies a folder that the user has picked. */
    fun pick(tree: Uri) = replace(picked) { target ->
        copyTree(tree, DocumentsContract.getTreeDocumentId(tree), target)
        if (!File(target, MANIFEST).isFile) {
            throw EdgelinException("that folder is no bundle: it has no $MANIFEST; pick one written by `edgelin export`")
        }
    }

    private fun replace(target: File, fill: (File) -> Unit) {
        val part = File(target.path + ".part")
        part.deleteRecursively()
        part.mkdirs()
        try {
            fill(part)
        } catch (error: Exception) {
            part.deleteRecursively()
            throw error
        }
        target.deleteRecursively()
        if (!part.renameTo(target)) throw EdgelinException("the bundle cannot be copied; free some memory of the phone")
    }

    private fun copyAssets(path: String, target: File) {
        val children = context.assets.list(path) ?: emptyArray()
        if (children.isEmpty()) return copy(context.assets.open(path), target)
        target.mkdirs()
        for (child in children) copyAssets("$path/$child", File(target, child))
    }

    private fun copyTree(tree: Uri, document: String, target: File) {
        target.mkdirs()
        val children = DocumentsContract.buildChildDocumentsUriUsingTree(tree, document)
        val columns = arrayOf(
            DocumentsContract.Document.COLUMN_DOCUMENT_ID,
            DocumentsContract.Document.COLUMN_DISPLAY_NAME,
            DocumentsContract.Document.COLUMN_MIME_TYPE,
        )
        val resolver = context.contentResolver
        resolver.query(children, columns, null, null, null)?.use { cursor ->
            while (cursor.moveToNext()) {
                val (id, name) = cursor.getString(0) to File(cursor.getString(1)).name
                if (cursor.getString(2) == DocumentsContract.Document.MIME_TYPE_DIR) {
                    copyTree(tree, id, File(target, name))
                } else {
                    val uri = DocumentsContract.buildDocumentUriUsingTree(tree, id)
                    copy(resolver.openInputStream(uri) ?: throw FileNotFoundException(name), File(target, name))
                }
            }
        }
    }

    private fun copy(from: InputStream, target: File) = from.use { input ->
        target.outputStream().use { input.copyTo(it, 1 shl 20) }
        Unit
    }

    private companion object {
        const val ASSETS = "bundle"
        const val MANIFEST = "edgelin.json"
    }
}
