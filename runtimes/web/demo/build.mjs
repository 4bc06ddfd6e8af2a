/** Build the demo page into demo/dist; `--serve [BUNDLE]` shows it with a bundle folder. */

import { cp, mkdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { serve } from "./serve.mjs";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));

export async function buildDemo(out = here("dist")) {
  await mkdir(out, { recursive: true });
  const entryPoints = ["main.ts", "worker.ts"].map(here);
  await build({ entryPoints, bundle: true, splitting: true, format: "esm", minify: true, outdir: out, logLevel: "error" });
  for (const name of ["index.html", "style.css"]) await cp(here(name), `${out}/${name}`);
  const wasm = "ort-wasm-simd-threaded.wasm";
  await cp(here(`../node_modules/onnxruntime-web/dist/${wasm}`), `${out}/${wasm}`);
  return out;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const out = await buildDemo();
  const at = process.argv.indexOf("--serve");
  if (at > 0) {
    const { url } = await serve({ "/": out, "/bundle/": process.argv[at + 1] ?? `${out}/bundle` }, 8080);
    console.log(`${url}/`);
  }
}
