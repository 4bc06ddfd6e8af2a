/** edgelin in Node: the runner over onnxruntime-node. */

import { readFile } from "node:fs/promises";
import { cpus } from "node:os";
import { join } from "node:path";
import { EdgelinError, checkNames, oneLine, why } from "./errors.js";
import { FILE_NAME as MANIFEST } from "./manifest.js";
import { open } from "./open.js";
import type { Bundle } from "./runner.js";
import { FILE_NAME as GOLDEN, selfTest } from "./self_test.js";

export type { Message } from "./chat.js";
export { EdgelinError } from "./errors.js";
export type { Manifest } from "./manifest.js";
export { Bundle, Stream, type Rows } from "./runner.js";
export type { Sampling } from "./sampler.js";

export interface LoadOptions {
  /** Graph of the bundle; its default one. */
  variant?: string;
  /** Threads of onnxruntime; 0: as many as it finds best; 0. */
  threads?: number;
  /** Whether the bundle's golden stream is replayed first; true. */
  selfTest?: boolean;
}

/** Open a bundle folder. */
export async function load(folder: string, options: LoadOptions = {}): Promise<Bundle> {
  if (typeof folder !== "string") throw new EdgelinError(`the bundle is ${String(folder)}; give the path of its folder`);
  checkNames(options, "option", ["variant", "threads", "selfTest"]);
  const { threads = 0, selfTest: replay = true } = options;
  if (typeof replay !== "boolean") throw new EdgelinError(`selfTest is ${String(replay)}; true or false is allowed`);
  const most = 8 * cpus().length;
  if (!Number.isInteger(threads) || threads < 0 || threads > most) {
    throw new EdgelinError(`threads is ${threads}; allowed: 0 (as onnxruntime finds best) .. ${most}`);
  }
  const bundle = await open(await onnxruntime(), { where: folder, read: (path) => read(folder, path) }, {
    device: "cpu",
    variant: (manifest) => options.variant ?? manifest.default_variant,
    options: {
      ...(threads ? { intraOpNumThreads: threads } : {}),
      logSeverityLevel: 4, // errors arrive as exceptions
    },
  });
  if (replay && GOLDEN in bundle.manifest.files) await selfTest(bundle);
  return bundle;
}

/** onnxruntime-node, told before it loads not to report usage. */
async function onnxruntime(): Promise<typeof import("onnxruntime-node")> {
  process.env["ORT_DISABLE_TELEMETRY"] ??= "1";
  try {
    return await import("onnxruntime-node");
  } catch (error) {
    throw new EdgelinError(`onnxruntime-node cannot be loaded (${oneLine(error)}); run: npm install onnxruntime-node`);
  }
}

/** One file of a bundle. */
async function read(folder: string, path: string): Promise<Uint8Array> {
  try {
    return await readFile(join(folder, path));
  } catch (error) {
    const next = path === MANIFEST ? "give a folder written by `edgelin export`" : "take the original, or export again";
    throw new EdgelinError(`${join(folder, path)} cannot be read: ${why(error)}; ${next}`);
  }
}
