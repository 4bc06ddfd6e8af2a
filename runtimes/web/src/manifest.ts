/** `edgelin.json`, the contract of a bundle; `runtimes/README.md` of edgelin describes it. */

import { EdgelinError, oneLine } from "./errors.js";
import { sha256Hex } from "./hash.js";

export const FILE_NAME = "edgelin.json";
export const PAST = "past"; // the axis of a state that grows
const FORMAT = 1;
const HASH_LIMIT = 256 * 2 ** 20; // larger files are compared by size

export interface FileRecord {
  sha256: string;
  bytes: number;
}

export interface StateSpec {
  name: string;
  input: string;
  output: string;
  kind: string;
  shape: (number | string)[];
  dtype: "float32" | "int64";
  initial: number;
}

export interface Variant {
  file: string;
  files: Record<string, FileRecord>;
  quantisation: { bits: number; operator?: string } | null;
}

export interface Manifest {
  format: number;
  model_hash: string;
  digest: string;
  input: { name: string; kind: "tokens" | "features"; vocab_size?: number; feature_size?: number };
  output: { name: string; size?: number; task?: string; head?: string; labels?: string[] };
  num_logits_to_keep: string;
  lengths?: string;
  max_time: number | null;
  chunk: number;
  states: StateSpec[];
  tokenizer: {
    file: string;
    eos_token_id: number;
    eos_token_ids?: number[];
    special_tokens?: Record<string, number>;
    chat_template?: string | null;
    chat_tokens?: Record<string, string>;
  } | null;
  min_onnxruntime: string;
  default_variant: string;
  variants: Record<string, Variant>;
  files: Record<string, FileRecord>;
  capsules?: Record<string, FileRecord & { file: string }>;
  default_capsule?: string | null;
}

/** Read and check a manifest; refuses one that was changed after the export. */
export async function parseManifest(bytes: Uint8Array, where: string): Promise<Manifest> {
  let found: Manifest;
  try {
    found = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (error) {
    throw new EdgelinError(`${where} is no JSON (${String(error)}); take the original, or export again`);
  }
  if (found?.format !== FORMAT) {
    throw new EdgelinError(`${where} has format ${found?.format}; this edgelin reads format ${FORMAT}: update it`);
  }
  const { digest, ...rest } = found;
  if (digest !== (await sha256Hex(new TextEncoder().encode(canonicalJson(rest))))) {
    throw new EdgelinError(`${where} differs from its digest; take the original, or export the bundle again`);
  }
  try {
    check(found, where);
  } catch (error) {
    if (error instanceof EdgelinError) throw error;
    throw new EdgelinError(`${where} is no valid manifest: ${oneLine(error)}; export the bundle again`); // a key is missing
  }
  return found;
}

/** The part that the graph carries too, in one spelling. */
export function contractOf(content: object): string {
  const keys = ["format", "input", "output", "num_logits_to_keep", "lengths", "max_time", "states", "profile"];
  return canonicalJson(Object.fromEntries(Object.entries(content).filter(([key]) => keys.includes(key))));
}

/** JSON in the spelling of RFC 8785, which is ECMAScript's own with sorted keys. */
export function canonicalJson(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
  return `{${entries.map(([key, item]) => `${JSON.stringify(key)}:${canonicalJson(item)}`).join(",")}}`;
}

/** Numbers of a step, or null for tokens. */
export function featureSize(manifest: Manifest): number | null {
  return manifest.input.kind === "features" ? manifest.input.feature_size! : null;
}

/** Numbers of an answer. */
export function outputSize(manifest: Manifest): number {
  return manifest.output.size ?? manifest.input.vocab_size!;
}

/** The shape of a state of `batch` rows after `past` steps. */
export function stateShape(spec: StateSpec, batch: number, past: number): number[] {
  return [batch, ...spec.shape.slice(1).map((size) => (size === PAST ? past : Number(size)))];
}

/** Compare a file with its record. */
export async function checkFile(bytes: Uint8Array, record: FileRecord, where: string): Promise<void> {
  if (bytes.byteLength !== record.bytes) {
    throw new EdgelinError(
      `${where} has ${bytes.byteLength} bytes where the manifest says ${record.bytes}; take the original`,
    );
  }
  if (record.bytes <= HASH_LIMIT && (await sha256Hex(bytes)) !== record.sha256) {
    throw new EdgelinError(`${where} differs from its sha256 in the manifest; take the original`);
  }
}

/** Refuse an onnxruntime that is older than the graphs need. */
export function checkVersion(manifest: Manifest, installed: string, where: string): void {
  const [have, need] = [installed, manifest.min_onnxruntime].map((text) =>
    text.split(".").map((part) => Number.parseInt(part, 10)),
  ) as [number[], number[]];
  const at = need.findIndex((part, index) => part !== (have[index] ?? 0));
  if (at >= 0 && (have[at] ?? 0) < need[at]!) {
    throw new EdgelinError(`${where} needs onnxruntime >= ${manifest.min_onnxruntime}, ${installed} is installed`);
  }
}

/** Refuse values that this runner could not follow. */
function check(manifest: Manifest, where: string): void {
  const need = (good: boolean, problem: string): void => {
    if (!good) throw new EdgelinError(`${where}: ${problem}; export the bundle again`);
  };
  const text = (value: unknown): boolean => typeof value === "string";
  const { input, output, tokenizer, max_time, default_variant } = manifest;
  need(input.kind === "tokens" || input.kind === "features", "input.kind is not known");
  need([input.name, output.name, manifest.num_logits_to_keep, manifest.model_hash].every(text), "a name is no text");
  need([outputSize(manifest), manifest.chunk, max_time ?? 1].every((size) => Number.isSafeInteger(size) && size >= 1), "a size is below 1");
  need(manifest.chunk <= (max_time ?? Infinity), "chunk is above max_time");
  need(input.kind === "features" || (text(tokenizer?.file) && Number.isSafeInteger(tokenizer?.eos_token_id)), "tokenizer has no file or end");
  need(input.kind === "tokens" || featureSize(manifest)! >= 1, "feature_size is below 1");
  for (const { name, input: from, output: to, dtype, shape, initial } of manifest.states) {
    need([name, from, to].every(text) && Number.isFinite(initial), "a state has no name or initial value");
    need(dtype === "float32" || dtype === "int64", `state ${name} is ${dtype}`);
    need(shape[0] === "batch", `state ${name} has no batch axis`);
    need(shape.slice(1).every((size) => size === PAST || (Number.isSafeInteger(size) && Number(size) >= 1)), `state ${name} has an odd shape`);
  }
  need(default_variant in manifest.variants, "default_variant is not among variants");
  for (const [name, { file, files }] of Object.entries(manifest.variants)) need(file in files, `the graph of variant ${name} is not among its files`);
  const records = [manifest.files, ...Object.values(manifest.variants).map(({ files }) => files)].flatMap((files) => Object.entries(files));
  for (const [path, { sha256, bytes }] of records) need(text(sha256) && Number.isSafeInteger(bytes), `file ${path} has no record`);
  const paths = [...records.map(([path]) => path), ...Object.values(manifest.capsules ?? {}).map(({ file }) => file)];
  for (const path of paths) {
    need(!path.startsWith("/") && !path.includes("\\") && !path.split("/").includes(".."), `file ${path} lies outside the bundle`);
  }
}
