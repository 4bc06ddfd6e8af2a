/** The runner and the demo page in Debian's Chromium. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtemp, readFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { buildDemo } from "../demo/build.mjs";
import { serve } from "../demo/serve.mjs";
import { buildPage } from "./build.mjs";
import { launch } from "./chromium.mjs";
import { CASES } from "./golden.mjs";

const run = promisify(execFile);
const GOLDEN = fileURLToPath(new URL("../../golden/", import.meta.url));
let [server, browser] = [];

before(async () => {
  const folder = await mkdtemp(join(tmpdir(), "edgelin-"));
  const [page, demo] = [join(folder, "page"), join(folder, "demo")];
  await Promise.all([buildPage(page), buildDemo(demo)]);
  server = await serve({ "/": demo, "/bundle/": join(GOLDEN, "portable", "bundle"), "/dist/": page, "/golden/": GOLDEN });
  browser = await launch();
});

after(async () => {
  await browser?.close();
  server?.close();
});

/** A page with the test functions; errors of the page fail the test. */
async function open(path = "/dist/", from = browser) {
  const page = await from.newPage();
  page.setDefaultTimeout(120_000); // a busy machine is no failure
  page.warnings = [];
  page.on("console", (message) => page.warnings.push(message.text()));
  page.on("pageerror", (error) => assert.fail(error));
  await page.goto(server.url + path);
  return page;
}

test("golden streams in WebAssembly, without cross-origin isolation", async () => {
  const page = await open();
  await page.waitForFunction(() => globalThis.edgelin);
  assert.equal(await page.evaluate(() => crossOriginIsolated), false);
  for (const [name, variant] of CASES) {
    const device = await page.evaluate(([name, variant]) => edgelin.golden(`/golden/${name}`, variant), [name, variant]);
    assert.equal(device, "wasm");
  }
  const slow = page.warnings.filter((text) => text.includes("MatMulNBits"));
  assert.deepEqual(slow.map((text) => /variant (\w+)/.exec(text)[1]), ["model_q8", "model_q4"]);
  assert.ok(server.requests.every((path) => !path.endsWith(".mjs")), "only the .wasm file is fetched from onnxruntime-web");
  await page.close();
});

test("a golden stream in a worker", async () => {
  const page = await open();
  const device = await page.evaluate(async () => {
    const worker = new Worker("/dist/page.js", { type: "module" });
    const answered = new Promise((resolve) => (worker.onmessage = ({ data }) => resolve(data)));
    worker.postMessage(["golden", "/golden/hybrid", "model"]);
    return answered;
  });
  assert.equal(device, "wasm");
  await page.close();
});

test("the self-test runs on the first load only, and states live in IndexedDB", async () => {
  const page = await open();
  await page.waitForFunction(() => globalThis.edgelin);
  const bundle = "/golden/portable/bundle";
  const loads = async () => {
    const before = server.requests.filter((path) => path.endsWith("golden.json")).length;
    await page.evaluate((bundle) => edgelin.load(bundle, { wasmFolder: "/dist/" }), bundle);
    return server.requests.filter((path) => path.endsWith("golden.json")).length - before;
  };
  assert.deepEqual([await loads(), await loads()], [1, 0]);
  const chosen = await page.evaluate(async () => {
    const bundle = await edgelin.load("/golden/fused/bundle", { wasmFolder: "/dist/" });
    return [bundle.manifest.default_variant, bundle.variant];
  });
  assert.deepEqual(chosen, ["model_q8", "model"]); // MatMulNBits is slow here
  const kept = await page.evaluate(async (bundle) => {
    const stream = await (await edgelin.load(bundle, { wasmFolder: "/dist/" })).stream();
    await stream.feed([5, 6, 7]);
    const store = await edgelin.Store.open("states");
    await store.put("one", await stream.save());
    const wanted = await stream.feed([8]);
    await stream.load(await store.get("one"));
    const got = await stream.feed([8]);
    return [await store.keys(), wanted.every((value, i) => value === got[i])];
  }, bundle);
  assert.deepEqual(kept, [["one"], true]);
  await page.close();
});

test("states that a fork, a reader or a capsule has outlive the stream's next token", async () => {
  const page = await open();
  await page.waitForFunction(() => globalThis.edgelin);
  const found = await page.evaluate(async () => {
    const bundle = await edgelin.load("/golden/portable/bundle", { wasmFolder: "/dist/" });
    const stream = await bundle.stream();
    await stream.feed([5, 6, 7]);
    const saved = await stream.save();
    await stream.feed([8]);
    const twin = stream.fork();
    const wanted = await stream.feed([9, 10]);
    const states = stream.states();
    await stream.feed([11]);
    const kept = [...states.values()].every(({ data }) => data.length > 0);
    const forked = await twin.feed([9, 10]);
    await stream.load(saved);
    await stream.feed([8]);
    const failed = await stream.feed([9, 1e9]).catch((error) => error.message);
    const again = await stream.feed([9, 10]);
    const same = (one, other) => one.every((value, i) => value === other[i]);
    return [kept, same(wanted, forked), same(wanted, again), failed];
  });
  assert.deepEqual(found.slice(0, 3), [true, true, true]);
  assert.match(found[3], /out of range/);
  await page.close();
});

test("WebGPU, on a software adapter", async () => {
  const gpu = await launch({ gpu: true });
  try {
    const page = await open("/dist/", gpu);
    await page.waitForFunction(() => globalThis.edgelin);
    const device = await page.evaluate(() => edgelin.golden("/golden/fused", "model_q4", { device: "webgpu", selfTest: "never" }));
    assert.equal(device, "webgpu");
    // Attention in a ring and complex states compute positions and angles in float64.
    for (const [name, node] of [["hybrid", "Cast"], ["complex", "Mul"]]) {
      page.warnings.length = 0;
      const instead = await page.evaluate((name) => edgelin.golden(`/golden/${name}`, "model", { device: "webgpu" }), name);
      assert.equal(instead, "wasm");
      const told = page.warnings.filter((text) => text.startsWith("edgelin:"));
      assert.equal(told.length, 1);
      assert.match(told[0], new RegExp(`no kernel for the types of ${node} .*; WebAssembly runs it instead$`));
    }
  } finally {
    await gpu.close();
  }
});

test("without an adapter WebAssembly runs what was meant for WebGPU; a damaged bundle is refused once", async () => {
  const page = await open();
  await page.waitForFunction(() => globalThis.edgelin);
  page.warnings.length = 0;
  const golden = () => edgelin.golden("/golden/features", "model", { device: "webgpu" });
  assert.equal(await page.evaluate(golden), "wasm");
  assert.match(page.warnings.join(" "), /edgelin: .*adapter.*; WebAssembly runs it instead/);
  const missing = () => edgelin.load("/golden/fused", { wasmFolder: "/dist/", device: "webgpu" }).catch((error) => error.message);
  assert.match(await page.evaluate(missing), /edgelin\.json cannot be fetched: 404/);
  await page.close();
});

test("options that are none, and a .wasm file that is not hosted, are told in one line", async () => {
  const page = await open();
  await page.waitForFunction(() => globalThis.edgelin);
  const told = (options) =>
    page.evaluate((options) => edgelin.load("/golden/fused/bundle", options).then(() => "loads", (error) => `${error}`), options);
  for (const odd of [{ device: "cuda" }, { selfTest: "sometimes" }, { threads: -1 }, { threads: 1.5 }]) {
    assert.match(await told({ wasmFolder: "/dist/", ...odd }), /^EdgelinError: (device|selfTest|threads) is .* allowed$/);
  }
  assert.match(await told({ wasmfolder: "/dist/" }), /^EdgelinError: there is no option wasmfolder; there are: variant, device/);
  for (let again = 0; again < 2; again++) assert.match(await told({ wasmFolder: "/nope/" }), /give its folder as wasmFolder$/);
  await page.close();
});

test("the demo's server answers odd paths, and tells in one line what it cannot serve", async () => {
  const { port } = new URL(server.url);
  for (const [path, status] of [["/%", 400], ["/%2e%2e/%2e%2e/package.json", 404], ["/none", 404], ["/", 200]]) {
    assert.equal((await fetch(`${server.url}${path}`)).status, status, path);
  }
  const script = fileURLToPath(new URL("../demo/build.mjs", import.meta.url));
  for (const [folder, taken] of [[join(GOLDEN, "none"), port], [join(GOLDEN, "portable", "bundle"), port], [join(GOLDEN, "portable", "bundle"), "99999"]]) {
    const failed = await run(process.execPath, [script, "--serve", folder], { env: { ...process.env, PORT: taken } }).catch((error) => error);
    assert.equal(failed.code, 1, folder);
    assert.match(failed.stderr, /^(.* has no edgelin\.json; give .*|the page cannot be served on port .*; choose .*)\n$/);
  }
});

/** Write `tokens` tokens on the demo page, and give the whole text. */
async function write(page, prompt, tokens) {
  await page.getByLabel("Tokens", { exact: true }).fill(String(tokens));
  await page.getByLabel("Write something").fill(prompt);
  await page.getByRole("button", { name: "Write on" }).click();
  await page.getByText(/^Done; it can go on\.$|^The model ended its text\.$/).waitFor();
  return page.locator("#text").textContent();
}

test("demo page: write, save, reload, go on exactly", async () => {
  const context = await browser.newContext({ viewport: { width: 390, height: 844 } });
  const page = await open("/", context);
  await page.getByText("The model is ready.").waitFor();
  const first = await write(page, "The quiet river", 30);
  assert.ok(first.startsWith("The quiet river") && first.length > 20, first);
  const position = await page.locator("#position").textContent();
  await page.getByRole("button", { name: "Save" }).click();
  await page.getByText("Saved at position").waitFor();
  const bytes = await page.locator("#state").textContent();
  const wanted = await write(page, "", 30);
  assert.equal(await page.locator("#state").textContent(), bytes);

  await page.reload();
  await page.getByText("The model is ready.").waitFor();
  await page.getByRole("button", { name: "Restore" }).click();
  await page.getByText("Restored").waitFor();
  await page.waitForFunction((position) => document.querySelector("#position").textContent === position, position);
  assert.equal(await page.locator("#text").textContent(), first);
  assert.equal(await write(page, "", 30), wanted);
  assert.match(await page.locator("#speed").textContent(), /^[1-9]/);
  assert.match(await page.locator("#memory").textContent(), /^[1-9][0-9.]* MiB$/);
  assert.match(await page.getByRole("img", { name: "Milliseconds a token" }).getAttribute("aria-label"), /from position/);
  assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390, "nothing is wider than a phone");
  await context.close();
});

test("demo page: pause, fork, a typed text while it writes, a downloaded and a foreign state", async () => {
  const page = await open("/");
  await page.getByText("The model is ready.").waitFor();
  await page.getByLabel("Tokens", { exact: true }).fill("100000");
  await page.getByLabel("Temperature").fill("0"); // goes on for ever after this prompt
  await page.getByLabel("Write something").fill("mill. mill");
  await page.keyboard.press("Enter");
  const further = (start) =>
    page.waitForFunction((start) => Number(document.querySelector("#position").textContent.replace(",", "")) > start, start);
  await further(60);
  await page.getByRole("button", { name: "Pause" }).click();
  await page.getByText("Paused.").waitFor();
  const position = Number((await page.locator("#position").textContent()).replace(",", ""));
  await page.getByRole("button", { name: "Write on" }).click();
  await further(position + 10);
  await page.getByLabel("Write something").fill(" Köln, naïve café!");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll("#text .yours").length === 2);
  await page.evaluate(() => document.querySelector("#pause").click()); // unless it ended before
  await page.getByText(/^Paused\.$|^The model ended its text\.$/).waitFor();
  const before = await page.locator("#text").textContent();
  assert.ok(before.includes(" Köln, naïve café!"));

  await page.getByRole("button", { name: "Fork" }).click();
  await page.getByRole("button", { name: "Stream 2" }).waitFor();
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    await page.addScriptTag({ path: fileURLToPath(import.meta.resolve("axe-core")) });
    const { violations } = await page.evaluate(() => axe.run());
    assert.deepEqual(violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]), [], colorScheme);
  }
  const one = await write(page, "", 20);
  await page.getByRole("button", { name: "Stream 1" }).click();
  assert.equal(await page.locator("#text").textContent(), before);
  assert.equal(await write(page, "", 20), one);

  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download state" }).click()]);
  const state = await readFile(await download.path());
  await page.getByLabel("State file").setInputFiles({ name: "mine.state", mimeType: "application/octet-stream", buffer: state });
  await page.getByText("[state of mine.state]").waitFor();
  const foreign = join(GOLDEN, "plain", "model.state");
  await page.getByLabel("State file").setInputFiles(foreign);
  await page.getByText("saved by another model").waitFor();
  await page.close();
});

test("demo page: a bundle folder that is dropped or picked, and one that is none", async () => {
  const page = await open("/");
  await page.getByText("The model is ready.").waitFor();
  const devtools = await page.context().newCDPSession(page);
  const data = { items: [], files: [join(GOLDEN, "hybrid", "bundle")], dragOperationsMask: 1 };
  for (const type of ["dragEnter", "dragOver", "dragOver", "drop"]) {
    await devtools.send("Input.dispatchDragEvent", { type, x: 100, y: 100, data });
    await page.waitForTimeout(100);
  }
  await page.waitForFunction(() => document.querySelector("#model").textContent.includes("variant model,"));
  await page.getByLabel("Bundle folder").setInputFiles(join(GOLDEN, "fused", "bundle"));
  await page.waitForFunction(() => document.querySelector("#model").textContent.includes("variant model,"));
  assert.ok((await write(page, "The", 5)).startsWith("The"));
  await page.getByLabel("Bundle folder").setInputFiles(join(GOLDEN, "features", "bundle"));
  await page.getByText("this bundle reads features").waitFor();
  await page.getByLabel("Bundle folder").setInputFiles(join(GOLDEN, "fused", "bundle", "onnx"));
  await page.getByText("there is no edgelin.json in the folder").waitFor();
  await page.close();
});
