/** Bundle the page that the browser tests open, with the .wasm files beside it. */

import { cp, mkdir, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));

export async function buildPage(out) {
  await mkdir(out, { recursive: true });
  await build({ entryPoints: [here("page.mjs")], bundle: true, format: "esm", splitting: true, outdir: out, logLevel: "error" });
  for (const name of ["ort-wasm-simd-threaded.wasm", "ort-wasm-simd-threaded.asyncify.wasm"]) {
    await cp(here(`../node_modules/onnxruntime-web/dist/${name}`), `${out}/${name}`);
  }
  await writeFile(`${out}/index.html`, '<!doctype html><title>edgelin</title><script type="module" src="/dist/page.js"></script>');
}
