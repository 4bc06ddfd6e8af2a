/** State files: how a stream stands, as safetensors, so that it goes on later or in another runner. */

import { bytesToHex, concatBytes } from "@noble/hashes/utils.js";

import { EdgelinError } from "./errors.js";
import { sha256Hex } from "./hash.js";
import { type Manifest, outputSize, stateShape } from "./manifest.js";
import { WINDOW } from "./sampler.js";
import { type TextTail, incomplete } from "./text.js";

const FORMAT = "1";
const SCALE = ".scale";

export interface Saved {
  modelHash: string;
  variant: string;
  position: number;
  /** Only of a stream of text. */
  text: { recent: number[]; tail: TextTail } | null;
  /** Name of a state or of the model's output to its values. */
  tensors: Map<string, Values>;
}

export interface Values {
  shape: readonly number[];
  data: Float32Array | BigInt64Array;
}

interface Stored {
  dtype: string;
  shape: number[];
  bytes: Uint8Array;
}

/** The bytes of a state file. */
export async function write(saved: Saved): Promise<Uint8Array> {
  const tensors = new Map<string, Stored>();
  for (const [name, { shape, data }] of saved.tensors) {
    if (data instanceof Float32Array && !data.every(Number.isFinite)) {
      throw new EdgelinError(`${name} is not finite, so the stream cannot be saved; reset it`);
    }
    const dtype = data instanceof Float32Array ? "F32" : "I64";
    tensors.set(name, { dtype, shape: [...shape], bytes: new Uint8Array(data.buffer, data.byteOffset, data.byteLength) });
  }
  const metadata: Record<string, string> = {
    edgelin_state: FORMAT,
    model_hash: saved.modelHash,
    variant: saved.variant,
    position: String(saved.position),
  };
  if (saved.text) {
    const { recent, tail } = saved.text;
    metadata["recent"] = JSON.stringify(recent);
    metadata["text"] = JSON.stringify({ pending: bytesToHex(tail.pending), held: tail.held });
  }
  metadata["sha256"] = await contentHash(metadata, tensors);
  return pack(metadata, tensors);
}

/** What a state file holds; refuses a damaged one. */
export async function read(bytes: Uint8Array, where: string): Promise<Saved> {
  const { metadata, tensors } = unpack(bytes, where);
  const found = metadata["edgelin_state"];
  if (found !== FORMAT) {
    throw new EdgelinError(`${where} is no state file of format ${FORMAT} (it says ${found ?? "nothing"}); save it again`);
  }
  if (metadata["sha256"] !== (await contentHash(metadata, tensors))) {
    throw new EdgelinError(`${where} is damaged: its content differs from its hash; save it again`);
  }
  try {
    const position = Number(/^[1-9][0-9]{0,18}$/.exec(metadata["position"] ?? "")?.[0]);
    if (!Number.isSafeInteger(position)) throw new Error(`position is ${metadata["position"]}`);
    return {
      modelHash: metadata["model_hash"] ?? "",
      variant: metadata["variant"] ?? "",
      position,
      text: "recent" in metadata || "text" in metadata ? textPart(metadata, position) : null,
      tensors: decode(tensors),
    };
  } catch (error) {
    throw new EdgelinError(`${where} is damaged: odd content (${(error as Error).message}); save it again`);
  }
}

/** Refuse what another model saved, or what this one cannot have. */
export function check(saved: Saved, where: string, manifest: Manifest, batch: number): void {
  const damaged = (problem: string): never => {
    throw new EdgelinError(`${where} is damaged or of another batch size: ${problem}; save it again`);
  };
  if (saved.modelHash !== manifest.model_hash) {
    throw new EdgelinError(
      `${where} was saved by another model (${saved.modelHash.slice(0, 12)}, this one is ` +
        `${manifest.model_hash.slice(0, 12)}); a state only fits the model that made it`,
    );
  }
  const wanted = new Map(manifest.states.map((s) => [s.name, { shape: stateShape(s, batch, saved.position), dtype: s.dtype }]));
  wanted.set(manifest.output.name, { shape: [batch, outputSize(manifest)], dtype: "float32" });
  for (const [name, { shape, dtype }] of wanted) {
    const values = saved.tensors.get(name) ?? damaged(`${name} is missing`);
    const kind = values.data instanceof Float32Array ? "float32" : "int64";
    if (kind !== dtype || String(values.shape) !== String(shape)) damaged(`${name} is ${kind} [${values.shape}]`);
    if (values.data instanceof Float32Array && !values.data.every(Number.isFinite)) damaged(`${name} is not finite`);
  }
  for (const name of saved.tensors.keys()) if (!wanted.has(name)) damaged(`the model has no ${name}`);
  for (const spec of manifest.states.filter((s) => s.kind === "position")) {
    const { data } = saved.tensors.get(spec.name)!;
    if (!(data as BigInt64Array).every((value) => value === BigInt(saved.position))) damaged("its positions disagree");
  }
  if ((manifest.input.kind === "tokens") !== (saved.text !== null)) damaged(`it is not of ${manifest.input.kind}`);
  if (saved.text?.recent.some((id) => id < 0 || id >= outputSize(manifest))) damaged("a recent id is out of range");
}

/** The text that goes with the tensors. */
function textPart(metadata: Record<string, string>, position: number): Saved["text"] {
  const recent: unknown = JSON.parse(metadata["recent"] ?? "null");
  const good = Array.isArray(recent) && recent.length === Math.min(position, WINDOW) && recent.every(Number.isSafeInteger);
  if (!good) throw new Error("recent is no list of the last ids");
  const stored = JSON.parse(metadata["text"] ?? "null") as { pending: string; held: string };
  if (typeof stored.held !== "string" || /\p{Surrogate}/u.test(stored.held) || !/^([0-9a-f]{2}){0,3}$/.test(stored.pending)) {
    throw new Error("text is no beginning of a character or a stop string");
  }
  const pending = Uint8Array.from(stored.pending.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
  if (incomplete(pending) !== pending.length) throw new Error("text holds a whole character");
  return { recent, tail: { pending, held: stored.held } };
}

/** The tensors as they step: those stored in fewer bytes become float32. */
function decode(tensors: Map<string, Stored>): Map<string, Values> {
  const found = new Map<string, Values>();
  for (const [name, { dtype, shape, bytes }] of tensors) {
    const scaled = name.endsWith(SCALE) && tensors.get(name.slice(0, -SCALE.length))?.dtype === "I8";
    if (scaled) continue;
    const buffer = new Uint8Array(bytes).buffer; // a copy, which is aligned
    if (dtype === "F32") found.set(name, { shape, data: new Float32Array(buffer) });
    else if (dtype === "I64") found.set(name, { shape, data: new BigInt64Array(buffer) });
    else if (dtype === "F16") found.set(name, { shape, data: Float32Array.from(new Uint16Array(buffer), half) });
    else if (dtype === "I8") {
      const scale = tensors.get(name + SCALE);
      if (scale?.dtype !== "F32" || String(scale.shape) !== String([...shape.slice(0, -1), 1])) {
        throw new Error(`${name} has no scales`);
      }
      const [scales, width] = [new Float32Array(new Uint8Array(scale.bytes).buffer), shape.at(-1)!];
      const data = Float32Array.from(new Int8Array(buffer), (value, at) => value * scales[Math.floor(at / width)]!);
      found.set(name, { shape, data });
    } else throw new Error(`${name} is ${dtype}`);
  }
  return found;
}

/** A float16 as a number. */
function half(bits: number): number {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : (2 ** -14 * fraction) / 1024);
}

/** sha256 of all metadata but itself, then of the tensors' bytes, both by name. */
async function contentHash(metadata: Record<string, string>, tensors: Map<string, Stored>): Promise<string> {
  const keys = Object.keys(metadata).filter((key) => key !== "sha256").sort();
  const head = new TextEncoder().encode(keys.map((key) => `${key}\0${metadata[key]}\0`).join(""));
  const parts = [head, ...[...tensors.keys()].sort().map((name) => tensors.get(name)!.bytes)];
  return sha256Hex(concatBytes(...parts));
}

/** safetensors: length of the header, header as JSON, bytes; widest types first, then by name. */
function pack(metadata: Record<string, string>, tensors: Map<string, Stored>): Uint8Array {
  const order = [...tensors].sort(([a, x], [b, y]) => Number(y.dtype === "I64") - Number(x.dtype === "I64") || (a < b ? -1 : 1));
  const header: Record<string, unknown> = { __metadata__: metadata };
  let end = 0;
  for (const [name, { dtype, shape, bytes }] of order) {
    header[name] = { dtype, shape, data_offsets: [end, (end += bytes.length)] };
  }
  const json = new TextEncoder().encode(JSON.stringify(header));
  const text = concatBytes(json, new Uint8Array(-json.length & 7).fill(0x20));
  const size = new Uint8Array(8);
  new DataView(size.buffer).setBigUint64(0, BigInt(text.length), true);
  return concatBytes(size, text, ...order.map(([, tensor]) => tensor.bytes));
}

/** The inverse of {@link pack}. */
function unpack(bytes: Uint8Array, where: string): { metadata: Record<string, string>; tensors: Map<string, Stored> } {
  try {
    if (bytes.length < 8) throw new Error("it is too short");
    const size = Number(new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength).getBigUint64(0, true));
    if (size > bytes.length - 8) throw new Error("the header is cut off");
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + size));
    const { __metadata__: metadata = {}, ...entries } = JSON.parse(text) as Record<string, any>;
    if (Object.values(metadata).some((value) => typeof value !== "string")) throw new Error("metadata is no text");
    const widths: Record<string, number> = { F64: 8, I64: 8, F32: 4, I32: 4, F16: 2, I8: 1 };
    const data = bytes.subarray(8 + size);
    const tensors = new Map<string, Stored>();
    let end = 0;
    for (const [name, entry] of Object.entries(entries).sort(([, a], [, b]) => a.data_offsets[0] - b.data_offsets[0])) {
      const count = entry.shape.reduce((product: number, axis: number) => product * axis, 1);
      const [from, to] = entry.data_offsets;
      if (from !== end || to - from !== count * (widths[entry.dtype] ?? NaN)) throw new Error(`odd size of ${name}`);
      tensors.set(name, { dtype: entry.dtype, shape: entry.shape, bytes: data.subarray(from, to) });
      end = to;
    }
    if (end !== data.length) throw new Error(`its tensors end at byte ${end} of ${data.length}`);
    return { metadata, tensors };
  } catch (error) {
    throw new EdgelinError(`${where} is damaged or no state file (${(error as Error).message}); save it again`);
  }
}

