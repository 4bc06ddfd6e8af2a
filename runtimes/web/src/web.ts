/**
 * edgelin in a browser, on a page or in a worker: the runner over onnxruntime-web. One thread, so
 * that a page needs no cross-origin isolation; the .wasm file comes from where you host it.
 */

import { DeviceError, EdgelinError, checkNames, oneLine } from "./errors.js";
import { FILE_NAME, type Manifest } from "./manifest.js";
import { type Ort, open } from "./open.js";
import type { Bundle, Files } from "./runner.js";
import { FILE_NAME as GOLDEN, selfTest } from "./self_test.js";
import { Store } from "./store.js";

export type { Message } from "./chat.js";
export { EdgelinError } from "./errors.js";
export type { Manifest } from "./manifest.js";
export { Bundle, Stream, type Files, type Rows } from "./runner.js";
export type { Sampling } from "./sampler.js";
export { Store, download } from "./store.js";

/** The one file of onnxruntime-web/dist that a page must host, by device. */
const WASM = { wasm: "ort-wasm-simd-threaded.wasm", webgpu: "ort-wasm-simd-threaded.asyncify.wasm" };

export interface LoadOptions {
  /** Graph of the bundle; its default one, or in WebAssembly one that is not slow there. */
  variant?: string;
  /** Where the model computes, if it can; `"wasm"`. */
  device?: "wasm" | "webgpu";
  /** URL of the folder with onnxruntime-web's .wasm file; the folder of the script that has this module. */
  wasmFolder?: string;
  /** Threads; more than 1 needs a cross-origin isolated page; 1. */
  threads?: number;
  /** Replay the bundle's golden stream: on the `"first"` load on this device, `"always"` or `"never"`. */
  selfTest?: "first" | "always" | "never";
  /** Called while files are fetched. */
  onProgress?: (loaded: number, total: number) => void;
}

/**
 * Open a bundle: the URL of its folder, or files that were dropped or picked, by relative path. Where
 * WebGPU cannot run it, WebAssembly does, with a warning; `bundle.device` says which it is.
 */
export async function load(source: string | URL | Files | ReadonlyMap<string, Blob>, options: LoadOptions = {}): Promise<Bundle> {
  checkNames(options, "option", ["variant", "device", "wasmFolder", "threads", "selfTest", "onProgress"]);
  const { device = "wasm", selfTest: when = "first", threads = 1 } = options;
  if (!Object.hasOwn(WASM, device)) throw new EdgelinError(`device is ${device}; "wasm" or "webgpu" is allowed`);
  if (!["first", "always", "never"].includes(when)) throw new EdgelinError(`selfTest is ${when}; "first", "always" or "never" is allowed`);
  if (!Number.isInteger(threads) || threads < 1) throw new EdgelinError(`threads is ${threads}; 1 or more is allowed`);
  try {
    return await loadOn(device, filesOf(source), options);
  } catch (error) {
    if (device === "wasm" || !(error instanceof DeviceError)) throw error;
    console.warn(`edgelin: ${error.message}; WebAssembly runs it instead`);
    return loadOn("wasm", filesOf(source), options);
  }
}

async function loadOn(device: "wasm" | "webgpu", files: Files, options: LoadOptions): Promise<Bundle> {
  const ort = await onnxruntime(device);
  if (options.wasmFolder) ort.env.wasm.wasmPaths = { wasm: `${options.wasmFolder.replace(/\/*$/, "/")}${WASM[device]}` };
  ort.env.wasm.numThreads = options.threads ?? 1;
  const bundle = await open(ort, files, {
    device,
    variant: (manifest) => chosen(manifest, options.variant ?? preferred(manifest, device), device),
    options: { executionProviders: [device], logSeverityLevel: 3 },
    onProgress: options.onProgress,
  });
  const when = options.selfTest ?? "first";
  if (when === "never" || !(GOLDEN in bundle.manifest.files)) return bundle;
  try {
    await testOnce(bundle, ort.env.versions.common, when === "always");
  } catch (error) {
    await bundle.release();
    throw error;
  }
  return bundle;
}

/** The variant that decodes fastest here: no MatMulNBits on WASM, whose build has no kernel for it. */
export function preferred(manifest: Manifest, device: string): string {
  if (device !== "wasm" || !isSlow(manifest, manifest.default_variant)) return manifest.default_variant;
  const others = Object.keys(manifest.variants).filter((name) => !isSlow(manifest, name));
  return others.find((name) => manifest.variants[name]!.quantisation) ?? others[0] ?? manifest.default_variant;
}

function isSlow(manifest: Manifest, variant: string): boolean {
  const quantisation = manifest.variants[variant]?.quantisation;
  return !!quantisation && (quantisation.operator ?? "MatMulNBits") === "MatMulNBits";
}

/** The variant, with a warning where it is slow. */
function chosen(manifest: Manifest, variant: string, device: string): string {
  if (device === "wasm" && isSlow(manifest, variant)) {
    console.warn(
      `edgelin: variant ${variant} has MatMulNBits, for which onnxruntime's WASM build takes the whole matrix apart at every token, ` +
        "about ten times as slow; export the bundle with --portable",
    );
  }
  return variant;
}

/** onnxruntime-web's build for a device; each is loaded only when it is asked for. */
async function onnxruntime(device: string): Promise<Ort> {
  try {
    return device === "webgpu" ? await import("onnxruntime-web/webgpu") : await import("onnxruntime-web/wasm");
  } catch (error) {
    throw new EdgelinError(`onnxruntime-web cannot be loaded (${oneLine(error)}); run: npm install onnxruntime-web`);
  }
}

/** Replay the golden stream unless this bundle passed here before. */
async function testOnce(bundle: Bundle, version: string, always: boolean): Promise<void> {
  const key = [bundle.manifest.digest, bundle.variant, bundle.device, version, navigator.userAgent].join(" ");
  const passed = await Store.open("edgelin-self-tests").catch(() => null); // storage may be forbidden
  if (!always && (await passed?.get(key))) return;
  await selfTest(bundle);
  await passed?.put(key, new Uint8Array([1])).catch(() => undefined);
}

/** Where a bundle's files come from. */
function filesOf(source: string | URL | Files | ReadonlyMap<string, Blob>): Files {
  if (source instanceof Map) return dropped(source as ReadonlyMap<string, Blob>);
  if (typeof source === "object" && "read" in source) return source;
  const folder = String(source).replace(/\/*$/, "/");
  return {
    where: folder.slice(0, -1),
    async read(path) {
      const url = new URL(folder + path.split("/").map(encodeURIComponent).join("/"), globalThis.location?.href);
      const answer = await fetch(url).catch((error: unknown) => {
        throw new EdgelinError(`${url} cannot be fetched: ${oneLine(error)}`);
      });
      if (!answer.ok) throw new EdgelinError(`${url} cannot be fetched: ${answer.status} ${answer.statusText}`);
      return new Uint8Array(await answer.arrayBuffer());
    },
  };
}

/** Files of a dropped or picked folder, whose own name may stand before every path. */
function dropped(found: ReadonlyMap<string, Blob>): Files {
  const manifest = [...found.keys()].filter((path) => path.split("/").at(-1) === FILE_NAME).sort((a, b) => a.length - b.length)[0];
  if (manifest === undefined) throw new EdgelinError(`there is no ${FILE_NAME} in the folder; choose a bundle made by edgelin export`);
  const root = manifest.slice(0, -FILE_NAME.length);
  return {
    where: root.replace(/\/$/, "") || "the folder",
    async read(path) {
      const blob = found.get(root + path);
      if (!blob) throw new EdgelinError(`${root}${path} is missing; choose the whole folder`);
      return new Uint8Array(await blob.arrayBuffer());
    },
  };
}
