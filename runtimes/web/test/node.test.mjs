/** The runner in Node, over onnxruntime-node and over the browser's WASM build. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdir, mkdtemp, readFile, writeFile, cp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { EdgelinError, load } from "edgelin/node";
import { sha256Hex } from "../dist/hash.js";
import { canonicalJson } from "../dist/manifest.js";
import { uniform } from "../dist/sampler.js";
import { TextDecoding, noTail } from "../dist/text.js";
import { CASES, parse, replay } from "./golden.mjs";

const GOLDEN = fileURLToPath(new URL("../../golden/", import.meta.url));
const CLI = fileURLToPath(new URL("../dist/cli.js", import.meta.url));
const run = promisify(execFile);
const fused = join(GOLDEN, "fused", "bundle");

for (const [name, variant] of CASES) {
  test(`golden stream ${name} ${variant}`, async () => {
    const bundle = await load(join(GOLDEN, name, "bundle"), { variant, threads: 1 });
    const golden = parse(await readFile(join(GOLDEN, name, `${variant}.json`), "utf8"));
    await replay(bundle, golden, (file) => readFile(join(GOLDEN, name, file)));
  });
}

test("an id out of range is refused, and the stream goes on", async () => {
  const stream = await (await load(fused, { variant: "model" })).stream();
  const before = await stream.feed([1, 2]);
  await assert.rejects(stream.feed([3, 300]), /token id 300 is out of range/);
  assert.equal(stream.position, 2);
  assert.deepEqual(stream.outputs, before);
});

test("the answers of all steps are those of single steps", async () => {
  const bundle = await load(join(GOLDEN, "features", "bundle"));
  const steps = Array.from({ length: 70 }, (_, t) => [Math.sin(t), 2, -t / 9, 0.5, 1]); // more than a call carries
  const all = await (await bundle.stream()).feed(steps, { all: true });
  const stream = await bundle.stream();
  for (const [t, step] of steps.entries()) {
    const one = await stream.feed([step]);
    for (const [i, value] of one.entries()) assert.ok(Math.abs(value - all[3 * t + i]) < 1e-4, `step ${t}`);
  }
  await assert.rejects(stream.feed([[1, 2, NaN, 4, 5]]), /not finite/);
  await assert.rejects(stream.feed([[1, 2, 3]]), /5 features/);
});

test("odd arguments are refused, and the stream stands where it stood", async () => {
  const bundle = await load(join(GOLDEN, "streams", "bundle"), { threads: 1 });
  const [states, rows] = [bundle.initialStates(3), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]];
  for (const lengths of [[4, 0, 0], [-1, 0, 0], [1.5, 0, 0], [1, 2], [1, 2, 3, 3]]) {
    await assert.rejects(bundle.call(states, rows, { lengths }), /lengths are .*; one for each of 3 rows is needed, 0 \.\. 3/);
  }
  for (const keep of [-1, 1.5]) await assert.rejects(bundle.call(states, rows, { keep }), /keep is/);
  await assert.rejects(bundle.call(states.slice(1), rows), /a call takes 4 states; 3 were given/);
  await assert.rejects(bundle.call(states, [[1], [1, 2], [3]]), /rows of one length/);
  for (const batch of [-1, 0, 1.5]) assert.throws(() => bundle.initialStates(batch), EdgelinError);
  await assert.rejects(bundle.stream({ capsule: "toString" }), /no capsule toString/);
  await assert.rejects(load(fused, { variant: "toString" }), /no variant toString/);
  await assert.rejects(load(undefined), /the bundle is undefined/);
  for (const options of [{ treads: 1 }, { wasmFolder: "/" }, null, 5, { selfTest: "never" }]) {
    await assert.rejects(load(fused, options), /there is no option .*; there are: variant|the options are|selfTest is never/);
  }

  const stream = await bundle.stream();
  const wanted = [...(await stream.feed(Int32Array.of(1, 2)))];
  for (const steps of ["ab", [-1], [1.5], ["1"], [[1]], [300]]) await assert.rejects(stream.feed(steps), /out of range|no list/, String(steps));
  for (const steps of [null, undefined, 5]) await assert.rejects(stream.feed(steps), /steps are no list/);
  await assert.rejects(stream.feed([]), /nothing to read/);
  for (const sampling of [{ maxtokens: 3 }, { topK: -1 }, { topP: 0 }, { seed: 1.5 }, { stop: "" }, { temperature: NaN }, null]) {
    await assert.rejects(stream.generate("a", sampling).next(), EdgelinError, JSON.stringify(sampling));
  }
  await assert.rejects(stream.generate(5).next(), EdgelinError);
  await assert.rejects(stream.generate("a\ud800").next(), /not valid Unicode/);
  for (const bytes of [null, "abc", new ArrayBuffer(10)]) await assert.rejects(stream.load(bytes), /damaged or no state file/);
  assert.equal(stream.position, 2);
  assert.deepEqual([...stream.outputs], wanted);

  const features = await (await load(join(GOLDEN, "features", "bundle"))).stream();
  for (const steps of [[1, 2], [[1, 2, 3, 4]], [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], [["a", 2, 3, 4, 5]], [[1e39, 2, 3, 4, 5]], [null]]) {
    await assert.rejects(features.feed(steps), /5 features|not finite/, JSON.stringify(steps));
  }
  assert.equal(features.position, 0);
  await features.feed([Float32Array.of(1, 2, 3, 4, 5)]);
});

test("two calls at a time are refused", async () => {
  const stream = await (await load(fused, { variant: "model" })).stream();
  const first = stream.feed([1]);
  await assert.rejects(stream.feed([2]), /still reading/);
  await first;
  assert.equal(stream.position, 1);
});

test("a fork goes its own way, and reset goes back", async () => {
  const stream = await (await load(fused, { variant: "model" })).stream();
  const first = await stream.feed([5, 6]);
  const twin = stream.fork();
  await twin.feed([7]);
  assert.equal(stream.position, 2);
  assert.deepEqual(await stream.feed([7]), twin.outputs);
  stream.reset();
  assert.deepEqual(await stream.feed([5, 6]), first);
});

test("a stop string that spans tokens ends the text", () => {
  const codec = { tokenBytes: (token) => new TextEncoder().encode(["a", "\nEN", "D", "b", "\nEx"][token]) };
  const decoding = new TextDecoding(codec, noTail(), ["\nEND"]);
  assert.deepEqual([0, 1, 3, 4, 1, 2].map((token) => decoding.push(token)), ["a", "", "\nENb", "\nEx", "", ""]);
  assert.equal(decoding.stopped, true);
});

test("splitmix64 gives its published numbers", () => {
  // From seed 1234567, as in Rosetta Code.
  const wanted = [6457827717110365317n, 3203168211198807973n, 9817491932198370423n];
  wanted.forEach((value, i) => assert.equal(uniform(1234567n, i), Number(value >> 11n) * 2 ** -53));
});

test("a changed file, manifest or state file is refused", async () => {
  const copy = join(await mkdtemp(join(tmpdir(), "edgelin-")), "bundle");
  await cp(fused, copy, { recursive: true });
  const stream = await (await load(copy, { variant: "model" })).stream();
  await stream.feed([1]);
  const state = Buffer.from(await stream.save());
  state[state.length - 1] ^= 1;
  await assert.rejects(stream.load(state), /differs from its hash/);
  await assert.rejects(stream.load(state.subarray(0, 40)), /damaged or no state file/);
  const other = await load(join(GOLDEN, "plain", "bundle"));
  const foreign = await other.stream();
  await foreign.feed([1]);
  await assert.rejects(stream.load(await foreign.save()), /another model/);
  const data = join(copy, "onnx", "model.onnx_data");
  const bytes = await readFile(data);
  bytes[9] ^= 1;
  await writeFile(data, bytes);
  await assert.rejects(load(copy, { variant: "model" }), /differs from its sha256/);
  const manifest = join(copy, "edgelin.json");
  await writeFile(manifest, (await readFile(manifest, "utf8")).replace('"chunk": 64', '"chunk": 32'));
  await assert.rejects(load(copy), /differs from its digest/);
});

/** A copy of the golden bundle with a changed manifest and other files, all with right hashes. */
async function altered(change, files = {}) {
  const copy = join(await mkdtemp(join(tmpdir(), "edgelin-")), "bundle");
  await cp(fused, copy, { recursive: true });
  const manifest = JSON.parse(await readFile(join(copy, "edgelin.json"), "utf8"));
  for (const [path, content] of Object.entries(files)) {
    const bytes = Buffer.from(content);
    await writeFile(join(copy, path), bytes);
    const records = path.startsWith("onnx/") ? manifest.variants.model.files : manifest.files;
    records[path] = { sha256: await sha256Hex(bytes), bytes: bytes.length };
  }
  change(manifest);
  const { digest: _, ...rest } = manifest;
  rest.digest = await sha256Hex(new TextEncoder().encode(canonicalJson(rest)));
  await writeFile(join(copy, "edgelin.json"), JSON.stringify(rest));
  return copy;
}

const nothing = () => undefined;
for (const [what, message, change, files] of [
  ["no states", /no valid manifest/, (m) => delete m.states],
  ["a state fewer than the graph", /not carry the contract/, (m) => m.states.pop()],
  ["an odd shape", /odd shape/, (m) => (m.states[0].shape[1] = 0)],
  ["no tokenizer", /tokenizer has no file/, (m) => (m.tokenizer = null)],
  ["no input", /no valid manifest/, (m) => (m.input = null)],
  ["a chunk above max_time", /chunk is above/, (m) => (m.max_time = 8)],
  ["a graph that is not recorded", /not among its files/, (m) => (m.variants.model.files = {})],
  ["a file outside", /outside the bundle/, (m) => (m.files["../x"] = m.files["golden.json"])],
  ["another format", /reads format 1/, (m) => (m.format = 2)],
  ["a newer onnxruntime", /needs onnxruntime >= 9/, (m) => (m.min_onnxruntime = "9.0.0")],
  ["a graph of another export", /not carry the contract/, nothing, { "onnx/model.onnx": await readFile(join(GOLDEN, "plain/bundle/onnx/model.onnx")) }],
  ["a graph that is none", /not carry the contract/, nothing, { "onnx/model.onnx": "no graph" }],
  ["a golden stream that is none", /golden\.json of the bundle cannot be replayed/, nothing, { "golden.json": "{}" }],
  ["a tokenizer that is none", /no tokenizer that this runner knows/, nothing, { "tokenizer.json": "{}" }],
]) {
  test(`a bundle is refused in one line: ${what}`, async () => {
    const folder = await altered(change, files);
    const refused = async () => (await (await load(folder, { variant: "model", threads: 1 })).text());
    await assert.rejects(refused, (error) => error instanceof EdgelinError && message.test(error.message) && !error.message.includes("\n"));
  });
}

test("threads that no machine has are refused", async () => {
  for (const threads of [-1, 1.5, 100_000]) await assert.rejects(load(fused, { threads }), /threads is .*; allowed: 0/);
});

test("a device that computes otherwise is told", async () => {
  const copy = join(await mkdtemp(join(tmpdir(), "edgelin-")), "bundle");
  await cp(fused, copy, { recursive: true });
  const bundle = await load(copy, { variant: "model", selfTest: false });
  const { selfTest } = await import("../dist/self_test.js");
  await selfTest(bundle);
  const call = bundle.call.bind(bundle);
  bundle.call = async (states, ...rest) => {
    const found = await call(states, ...rest);
    found.outputs.data.forEach((value, i, all) => (all[i] = value + 1));
    return found;
  };
  await assert.rejects(selfTest(bundle), EdgelinError);
});

test("edgelin-run writes on, and goes on from a state file", async () => {
  const folder = await mkdtemp(join(tmpdir(), "edgelin-"));
  const state = join(folder, "a.state");
  const options = ["--variant", "model", "--temperature", "0", "--max-tokens"];
  const whole = await run(process.execPath, [CLI, fused, "The quiet", ...options, "20"]);
  const first = await run(process.execPath, [CLI, fused, "The quiet", ...options, "8", "--save-state", state]);
  const second = await run(process.execPath, [CLI, fused, ...options, "12", "--load-state", state]);
  const shown = (text) => text.replace(/[\ufffd\n]/g, ""); // an incomplete character is shown at an end only
  assert.equal(shown(first.stdout + second.stdout), shown(whole.stdout));
  const error = await run(process.execPath, [CLI, folder, "x"]).catch((failed) => failed);
  assert.equal(error.code, 1);
  assert.equal(error.stderr.trimEnd().split("\n").length, 1);
});

test("files that edgelin-run cannot read or write end it in one line, and leave an older state whole", async () => {
  const folder = await mkdtemp(join(tmpdir(), "edgelin-"));
  const [state, cut] = [join(folder, "a.state"), join(folder, "cut.state")];
  const options = ["--variant", "model", "--temperature", "0", "--max-tokens", "2"];
  await run(process.execPath, [CLI, fused, "The", ...options, "--save-state", state]);
  const before = await readFile(state);
  await writeFile(cut, before.subarray(0, 7));
  await mkdir(`${state}.part`); // where the new one is written first
  const odd = [
    [fused, "--load-state", join(folder, "none")], [fused, "--load-state", folder], [fused, "--load-state", cut],
    [fused, "x", "--save-state", folder], [fused, "x", "--save-state", join(folder, "none", "b")], [fused, "x", "--save-state", state],
    [folder, "x"], [join(folder, "none"), "x"], [state, "x"],
  ];
  for (const words of odd) {
    const { code, stderr } = await run(process.execPath, [CLI, ...words, ...options]).catch((failed) => failed);
    assert.equal(code, 1, words);
    assert.match(stderr, /^edgelin-run: .*; (give|save) .*\n$/, words);
    assert.doesNotMatch(stderr, /E[A-Z]{4,}|DataView/);
  }
  assert.deepEqual(await readFile(state), before);
});

test("edgelin-run whose reader goes away ends without a stack trace", async () => {
  const shell = `"${process.execPath}" "${CLI}" "${fused}" x --variant model --max-tokens 3000 | head -c 1`;
  const { stderr } = await run("sh", ["-c", shell]);
  assert.equal(stderr, "");
});

test("edgelin-run --chat", async () => {
  const template = await readFile(join(GOLDEN, "templates", "chatml.jinja"), "utf8");
  const bundle = await altered((m) => (m.tokenizer.chat_template = "chat_template.jinja"), { "chat_template.jinja": template });
  const options = ["--variant", "model", "--temperature", "0", "--max-tokens", "6"];
  const { stdout } = await run(process.execPath, [CLI, bundle, "Hello", "--chat", "--system", "S", ...options]);
  const stream = await (await load(bundle, { variant: "model" })).stream();
  let wanted = "";
  for await (const piece of stream.chat("Hello", { system: "S", temperature: 0, maxTokens: 6 })) wanted += piece;
  assert.equal(stdout, `${wanted}${stream.flush()}\n`);
  for (const words of [["--chat"], ["x", "--system", "S"]]) {
    const error = await run(process.execPath, [CLI, bundle, ...words, ...options]).catch((failed) => failed);
    assert.equal(error.code, 1);
    assert.match(error.stderr, /^edgelin-run: --(chat|system) needs .*\n$/);
  }
  const error = await run(process.execPath, [CLI, fused, "x", "--chat", ...options]).catch((failed) => failed);
  assert.match(error.stderr, /^edgelin-run: the bundle has no chat template.*\n$/);
});
