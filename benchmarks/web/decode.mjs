/**
 * Tokens a second in headless Chromium, WebAssembly on one thread, beside onnxruntime-node on one
 * thread in alternating rounds, of which the first is not counted:
 * `node benchmarks/web/decode.mjs BUNDLE [--rounds 16] [--browser-only]`.
 */

import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { serve } from "../../runtimes/web/demo/serve.mjs";
import { load } from "../../runtimes/web/dist/node.js";
import { buildPage } from "../../runtimes/web/test/build.mjs";
import { launch } from "../../runtimes/web/test/chromium.mjs";
import { decode } from "../../runtimes/web/test/decode.mjs";

const TOKENS = 100; // a round

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { rounds: { type: "string", default: "16" }, "browser-only": { type: "boolean", default: false } },
});
const [bundle] = positionals;
if (bundle === undefined) throw new Error("give a bundle: node benchmarks/web/decode.mjs BUNDLE");
const folder = await mkdtemp(join(tmpdir(), "edgelin-"));
await buildPage(folder);
const server = await serve({ "/dist/": folder, "/bundle/": bundle });
const browser = await launch();
try {
  const page = await browser.newPage();
  await page.goto(`${server.url}/dist/`);
  await page.waitForFunction(() => globalThis.edgelin);
  const variant = await page.evaluate(() => edgelin.begin("/bundle"));
  const runners = { [`Chromium ${browser.version()}, ${variant}`]: () => page.evaluate((count) => edgelin.decode(count), TOKENS) };
  for (const name of values["browser-only"] ? [] : ["model", "model_q4"]) {
    const stream = await (await load(bundle, { variant: name, threads: 1 })).stream({ capsule: "none" });
    await stream.feed([1]);
    runners[`onnxruntime-node, ${name}`] = () => decode(stream, TOKENS);
  }
  const speeds = Object.fromEntries(Object.keys(runners).map((name) => [name, []]));
  for (let round = 0; round < Number(values.rounds); round++) {
    for (const [name, run] of Object.entries(runners)) speeds[name].push(await run());
  }
  console.log(`one thread, ${values.rounds - 1} rounds of ${TOKENS} tokens`);
  for (const [name, [, ...found]] of Object.entries(speeds)) {
    found.sort((a, b) => a - b);
    const [median, best] = [found[found.length >> 1], found.at(-1)].map((speed) => speed.toFixed(0));
    console.log(`${name.padEnd(42)}best ${best.padStart(4)}, median ${median.padStart(4)} tokens/s`);
  }
} finally {
  await browser.close();
  server.close();
  await rm(folder, { recursive: true });
}
