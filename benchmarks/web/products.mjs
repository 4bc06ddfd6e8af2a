/**
 * Milliseconds of one vector's products by 24 matrices, float and in unsigned int8, in onnxruntime-web's
 * WebAssembly build on one thread, in alternating rounds: `node benchmarks/web/products.mjs FOLDER`.
 */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as ort from "../../runtimes/web/node_modules/onnxruntime-web/dist/ort.node.min.mjs";

const [ROUNDS, CALLS] = [21, 20];
const KINDS = { float: "float", tensor: "uint8, a scale a call", fused: "the same, DynamicQuantizeMatMul", row: "uint8, a scale a step" };

ort.env.wasm.numThreads = 1;
const runs = [];
for (const [kind, label] of Object.entries(KINDS)) {
  const session = await ort.InferenceSession.create(await readFile(join(process.argv[2], `${kind}.onnx`)), { executionProviders: ["wasm"] });
  runs.push({ label, session, times: [] });
}
const [x, chunk] = [1, 5].map((time) => new ort.Tensor("float32", Float32Array.from({ length: 256 * time }, (_, i) => Math.sin(i * i)), [1, time, 256]));
for (let round = 0; round < ROUNDS; round++) {
  for (const { session, times } of runs) {
    const begin = performance.now();
    for (let call = 0; call < CALLS; call++) await session.run({ x });
    times.push((performance.now() - begin) / CALLS);
  }
}
for (const { label, session, times } of runs) {
  const [[one], [all]] = [Object.values(await session.run({ x })), Object.values(await session.run({ x: chunk }))];
  const apart = Math.max(...one.data.map((value, i) => Math.abs(value - all.data[i]))) / Math.max(...one.data.map(Math.abs));
  times.sort((a, b) => a - b);
  const [best, median] = [times[0], times[ROUNDS >> 1]].map((time) => time.toFixed(2));
  console.log(`${label.padEnd(34)}best ${best}, median ${median} ms; chunk beside steps ${apart.toExponential(0)}`);
}
