/** Opening a bundle over any of onnxruntime's JavaScript builds. */

import type { Env, InferenceSession, InferenceSessionFactory, TensorConstructor } from "onnxruntime-common";
import { DeviceError, EdgelinError, oneLine } from "./errors.js";
import { metadata, withoutDefaults } from "./graph.js";
import { FILE_NAME, type Manifest, checkFile, checkVersion, contractOf, parseManifest } from "./manifest.js";
import { Bundle, type Files } from "./runner.js";

export interface Ort {
  InferenceSession: InferenceSessionFactory;
  Tensor: TensorConstructor;
  env: Env;
}

const SESSION = {
  force_spinning_stop: "1", // workers spin within a call only
  disable_quant_qdq: "1", // weights of a portable graph become float ones when it is loaded
};

export interface Opening {
  device: string;
  /** Which graph. */
  variant: (manifest: Manifest) => string;
  options: InferenceSession.SessionOptions;
  onProgress?: ((loaded: number, total: number) => void) | undefined;
}

/** A bundle whose files were compared with its manifest. */
export async function open(ort: Ort, files: Files, { device, variant, options, onProgress }: Opening): Promise<Bundle> {
  const manifest = await parseManifest(await files.read(FILE_NAME), `${files.where}/${FILE_NAME}`);
  const { node, web, common } = ort.env.versions;
  checkVersion(manifest, (device === "cpu" ? node : web) ?? common, files.where);
  const name = variant(manifest);
  const graph = Object.hasOwn(manifest.variants, name) ? manifest.variants[name] : undefined;
  if (!graph) throw new EdgelinError(`${files.where} has no variant ${name}; it has: ${Object.keys(manifest.variants).join(", ")}`);
  const contents = await readAll(files, graph.files, onProgress);
  const optional = new Set([manifest.num_logits_to_keep, manifest.lengths ?? ""]);
  const externalData = [...contents]
    .filter(([path]) => path !== graph.file)
    .map(([path, data]) => ({ path: path.split("/").at(-1)!, data }));
  const onnx = contents.get(graph.file)!;
  if (!carries(onnx, manifest)) {
    throw new EdgelinError(`${files.where}/${graph.file} does not carry the contract of ${FILE_NAME}; the files are of different exports: export again`);
  }
  try {
    const model = withoutDefaults(onnx, optional);
    const session = await ort.InferenceSession.create(model, { ...options, externalData, extra: { session: SESSION } });
    return new Bundle(manifest, name, { session, Tensor: ort.Tensor, device }, files);
  } catch (error) {
    throw new DeviceError(`onnxruntime cannot load ${files.where}/${graph.file} (${device}): ${missingKernel(error) ?? missingWasm(error) ?? oneLine(error)}`);
  }
}

/** Whether a graph was exported with this manifest. */
function carries(onnx: Uint8Array, manifest: Manifest): boolean {
  try {
    return contractOf(JSON.parse(metadata(onnx, "edgelin")) as object) === contractOf(manifest);
  } catch {
    return false; // no ONNX file, or one of someone else
  }
}

/** Which operator no kernel was found for, as onnxruntime's WebGPU build and its other ones say it. */
function missingKernel(error: unknown): string | null {
  const found = /Provider type for (\w+) node with name '(\S*)' is not set|implementation for (\w+)\(\d+\) node with name '(\S*)'/.exec(String(error));
  return found && `it has no kernel for the types of ${found[1] ?? found[3]} ${found[2] ?? found[4]}`;
}

/** Where a page does not host onnxruntime's .wasm file, or gives no `wasmFolder`. */
function missingWasm(error: unknown): string | null {
  const missing = /fetching of the wasm failed|initWasm\(\)' failed/.test(String(error));
  return missing ? "onnxruntime's .wasm file cannot be fetched; host it and give its folder as wasmFolder" : null;
}

/** The files of a variant, compared with their records. */
async function readAll(
  files: Files, records: Manifest["files"], onProgress: Opening["onProgress"],
): Promise<Map<string, Uint8Array>> {
  const total = Object.values(records).reduce((sum, record) => sum + record.bytes, 0);
  const contents = new Map<string, Uint8Array>();
  let loaded = 0;
  for (const [path, record] of Object.entries(records)) {
    const bytes = await files.read(path);
    await checkFile(bytes, record, `${files.where}/${path}`);
    contents.set(path, bytes);
    onProgress?.((loaded += record.bytes), total);
  }
  return contents;
}
