/** Build the demo page into demo/dist; `--serve [BUNDLE]` shows it with a bundle folder, on PORT (8080). */

import { existsSync } from "node:fs";
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

/** Serve the page until the process ends. */
async function show(page, bundle, port) {
  try {
    console.log(`${(await serve({ "/": page, "/bundle/": bundle }, port)).url}/`);
  } catch (error) {
    console.error(`the page cannot be served on port ${port} (${error.code}); choose another, as in PORT=8081`);
    process.exit(1);
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const at = process.argv.indexOf("--serve");
  const bundle = at > 0 ? process.argv[at + 1] : undefined;
  if (bundle !== undefined && !existsSync(`${bundle}/edgelin.json`)) {
    console.error(`${bundle} has no edgelin.json; give a folder written by \`edgelin export --portable\``);
    process.exit(1);
  }
  const out = await buildDemo();
  if (at > 0) await show(out, bundle ?? `${out}/bundle`, process.env.PORT ?? "8080");
}
