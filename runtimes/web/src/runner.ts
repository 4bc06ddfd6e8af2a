/**
 * The runner: makes the states that the manifest lists, feeds them, and swaps the outputs in. It
 * knows no architecture and computes nothing of the model; onnxruntime is given by web.ts or node.ts.
 */

import type { InferenceSession, Tensor, TensorConstructor } from "onnxruntime-common";
import * as chat from "./chat.js";
import { EdgelinError, oneLine } from "./errors.js";
import { type FileRecord, type Manifest, checkFile, featureSize, outputSize, stateShape } from "./manifest.js";
import { type Sampling, WINDOW, choose, settings } from "./sampler.js";
import * as stateFile from "./state_file.js";
import { TextCodec, TextDecoding, type TextTail, flush, noTail } from "./text.js";

/** Longest time in ms that a generating stream keeps other tasks of its thread waiting. */
const BREATH = 12;

/** Where the files of a bundle come from. */
export interface Files {
  /** What the bundle is called in errors. */
  readonly where: string;
  /** The content of a file; throws where there is none. */
  read(path: string): Promise<Uint8Array>;
}

/** An onnxruntime session, whose inputs with default values were made plain inputs, with what it needs to make tensors. */
export interface Opened {
  session: InferenceSession;
  Tensor: TensorConstructor;
  /** `"wasm"`, `"webgpu"` or `"cpu"`. */
  device: string;
}

/** Steps of a call: a row for each stream, of token ids or of feature vectors. */
export type Rows = readonly (readonly number[] | readonly (readonly number[])[])[];

/** Steps of a stream: token ids, or feature vectors; arrays of numbers of any type. */
export type Steps = ArrayLike<number> | readonly ArrayLike<number>[];

export interface CallOptions {
  /** How many last answers of every row to give; 0 is all; 1. */
  keep?: number;
  /** Steps that each row really has, where the manifest has `lengths`. */
  lengths?: readonly number[];
}

/** A checked bundle with one session; makes any number of streams. */
export class Bundle {
  readonly #opened: Opened;
  readonly #files: Files;
  #text: TextCodec | null = null;
  #last: Promise<unknown> = Promise.resolve();

  constructor(
    readonly manifest: Manifest,
    readonly variant: string,
    opened: Opened,
    files: Files,
  ) {
    this.#opened = opened;
    this.#files = files;
  }

  /** Where the model computes: `"wasm"`, `"webgpu"` or `"cpu"`. */
  get device(): string {
    return this.#opened.device;
  }

  /** A common file of the bundle, compared with its record. */
  async file(path: string, record: FileRecord | undefined = this.manifest.files[path]): Promise<Uint8Array> {
    const where = `${this.#files.where}/${path}`;
    if (!record) throw new EdgelinError(`${where} is not among the files of the manifest`);
    const bytes = await this.#files.read(path);
    await checkFile(bytes, record, where);
    return bytes;
  }

  /** The tokenizer, read on first use. */
  async text(): Promise<TextCodec> {
    const { tokenizer } = this.manifest;
    if (!tokenizer) throw new EdgelinError(`${this.#files.where} reads features, not text; use feed`);
    if (!this.#text) {
      const config = "tokenizer_config.json";
      const options = config in this.manifest.files ? await this.file(config) : null;
      this.#text = TextCodec.read(await this.file(tokenizer.file), options, outputSize(this.manifest));
    }
    return this.#text;
  }

  /** Token ids of a dialogue in the model's own format, up to where the next reply begins. */
  async dialogue(messages: readonly chat.Message[]): Promise<number[]> {
    return chat.dialogue(this, messages, true);
  }

  /** States before the first step. */
  initialStates(batch: number): Tensor[] {
    if (!Number.isSafeInteger(batch) || batch < 1) throw new EdgelinError(`a batch of ${batch} rows is not possible; give 1 or more`);
    return this.manifest.states.map((spec) => {
      const shape = stateShape(spec, batch, 0);
      const size = shape.reduce((product, axis) => product * axis, 1);
      return spec.dtype === "int64"
        ? this.tensor(new BigInt64Array(size).fill(BigInt(spec.initial)), shape)
        : this.tensor(new Float32Array(size).fill(spec.initial), shape);
    });
  }

  tensor(data: Float32Array | BigInt64Array, shape: readonly number[]): Tensor {
    const { Tensor } = this.#opened;
    return data instanceof Float32Array ? new Tensor("float32", data, shape) : new Tensor("int64", data, shape);
  }

  /** One call of the graph; the states that went in stay as they are. */
  async call(states: readonly Tensor[], rows: Rows, { keep = 1, lengths }: CallOptions = {}): Promise<{ outputs: Tensor; states: Tensor[] }> {
    const { manifest } = this;
    if (!Number.isSafeInteger(keep) || keep < 0) throw new EdgelinError(`keep is ${keep}; 0 (all) or more is allowed`);
    if (states.length !== manifest.states.length) throw new EdgelinError(`a call takes ${manifest.states.length} states; ${states.length} were given`);
    const feeds: Record<string, Tensor> = {
      [manifest.input.name]: this.#steps(rows),
      [manifest.num_logits_to_keep]: this.tensor(BigInt64Array.of(BigInt(keep)), []),
    };
    if (manifest.lengths) {
      const time = rows[0]?.length ?? 0;
      const found = lengths ?? rows.map(() => time);
      if (found.length !== rows.length || !found.every((length) => Number.isSafeInteger(length) && length >= 0 && length <= time)) {
        throw new EdgelinError(`lengths are ${found}; one for each of ${rows.length} rows is needed, 0 .. ${time}`);
      }
      feeds[manifest.lengths] = this.tensor(BigInt64Array.from(found, BigInt), [rows.length]);
    } else if (lengths) throw new EdgelinError("the bundle takes no lengths; export it with --streams");
    manifest.states.forEach((spec, i) => (feeds[spec.input] = states[i]!));
    const found = await this.#run(feeds);
    return { outputs: found[manifest.output.name]!, states: manifest.states.map((spec) => found[spec.output]!) };
  }

  /**
   * Free states that nothing else reads. onnxruntime-web makes new arrays for every answer, and arrays
   * that wait for the garbage collector cost a page fault for each 4 KiB of the next ones.
   */
  discard(states: readonly Tensor[]): void {
    if (this.#opened.device === "cpu") return; // onnxruntime-node keeps the memory itself
    for (const { data } of states) (data as { buffer: ArrayBuffer }).buffer.transfer?.(0);
  }

  /** A new stream, in the bundle's default capsule unless `capsule` says another, or `"none"`. */
  async stream({ capsule = this.manifest.default_capsule ?? "none" }: { capsule?: string } = {}): Promise<Stream> {
    const stream = new Stream(this);
    if (capsule !== "none") {
      const { capsules = {} } = this.manifest;
      const record = Object.hasOwn(capsules, capsule) ? capsules[capsule] : undefined;
      if (!record) throw new EdgelinError(`${this.#files.where} has no capsule ${capsule}`);
      stream.begin(await stateFile.read(await this.file(record.file, record), record.file), record.file);
    }
    return stream;
  }

  /** Free the session's memory. */
  async release(): Promise<void> {
    await this.#last;
    await this.#opened.session.release();
  }

  /** Calls of all streams run one after the other. */
  async #run(feeds: Record<string, Tensor>): Promise<Record<string, Tensor>> {
    const found = this.#last.then(() => this.#opened.session.run(feeds));
    this.#last = found.catch(() => undefined);
    try {
      return (await found) as Record<string, Tensor>;
    } catch (error) {
      throw new EdgelinError(`onnxruntime failed: ${oneLine(error)}`);
    }
  }

  /** The input tensor; refuses what onnxruntime would not, or the states would keep for ever. */
  #steps(rows: Rows): Tensor {
    const { manifest } = this;
    const time = rows[0]?.length ?? 0;
    const limit = manifest.max_time ?? Infinity;
    if (time === 0 || time > limit || rows.some((row) => row.length !== time)) {
      throw new EdgelinError(`a call needs rows of one length, 1 .. ${limit}; they have ${rows.map((row) => row.length)}`);
    }
    const size = featureSize(manifest);
    if (size === null) {
      const flat = rows.flat() as number[];
      const bad = flat.find((id) => !Number.isInteger(id) || id < 0 || id >= manifest.input.vocab_size!);
      if (bad !== undefined) throw new EdgelinError(`token id ${bad} is out of range; the model knows 0 .. ${manifest.input.vocab_size! - 1}`);
      return this.tensor(BigInt64Array.from(flat, BigInt), [rows.length, time]);
    }
    const steps = rows.flat() as ArrayLike<number>[];
    if (!steps.every((step) => step?.length === size)) throw new EdgelinError(`a step has ${size} features`);
    const data = Float32Array.from(steps.flatMap((step) => Array.from(step)));
    if (!data.every(Number.isFinite)) throw new EdgelinError("a feature is not finite; leave the step out");
    return this.tensor(data, [rows.length, time, size]);
  }
}

/** One conversation with a model, or one stream of features; made by {@link Bundle.stream}. */
export class Stream {
  readonly #bundle: Bundle;
  #states: Tensor[];
  #tail: TextTail = noTail();
  #recent: number[] = [];
  #position = 0;
  #outputs: Float32Array | null = null;
  #start: stateFile.Saved | null = null;
  #busy = false;
  /** Whether others may still read the arrays of the states: a fork, a capsule, who asked for them. */
  #lent = false;

  constructor(bundle: Bundle) {
    this.#bundle = bundle;
    this.#states = bundle.initialStates(1);
  }

  /** Tokens or steps read so far. */
  get position(): number {
    return this.#position;
  }

  /** The last answer: logits of the next token, or outputs of a model of features; null before it. */
  get outputs(): Float32Array | null {
    return this.#outputs;
  }

  /** Size of the states in bytes, whatever the position (unless a state of the model grows). */
  get stateBytes(): number {
    return this.#states.reduce((sum, { size, type }) => sum + size * (type === "int64" ? 8 : 4), 0);
  }

  /** Shape and content of the states by name; not to be written to. */
  states(): Map<string, stateFile.Values> {
    this.#lent = true;
    return new Map(this.#bundle.manifest.states.map((spec, i) => [spec.name, values(this.#states[i]!)]));
  }

  /**
   * Read token ids, or feature vectors; long inputs are cut into calls. If one fails, nothing changes.
   * Gives the last answer, or with `all` the answers of all steps, one after the other.
   */
  async feed(steps: Steps, { all = false } = {}): Promise<Float32Array> {
    return this.#alone(() => this.#feed(steps, all));
  }

  /**
   * Read a prompt (text or ids; without one, go on where the stream stands) and write on: a piece of
   * text a token, empty while a character or a stop string may be incomplete. Leaving the loop leaves
   * the state behind the last piece.
   */
  async *generate(prompt?: string | readonly number[] | null, sampling: Sampling = {}): AsyncGenerator<string, void, void> {
    const options = settings(sampling);
    const codec = await this.#bundle.text();
    if (prompt !== undefined && prompt !== null) {
      const ids = typeof prompt === "string" ? codec.encode(prompt, this.#position === 0) : prompt;
      if (ids.length === 0) throw new EdgelinError("the prompt is empty; give at least one token to go on from");
      await this.feed(ids);
      this.#tail = noTail();
    }
    if (!this.#outputs) throw new EdgelinError("the stream has read nothing yet; give a prompt");
    const tokenizer = this.#bundle.manifest.tokenizer!;
    const ends = new Set([tokenizer.eos_token_id, ...(tokenizer.eos_token_ids ?? [])]);
    const decoding = new TextDecoding(codec, this.#tail, options.stop);
    let rested = performance.now();
    for (let count = 0; count < options.maxTokens && !decoding.stopped; count++) {
      const token = choose(this.#outputs!, this.#recent, this.#position, options);
      if (ends.has(token)) return yield this.flush();
      await this.feed([token]);
      if (performance.now() - rested > BREATH) {
        await otherTasks();
        rested = performance.now();
      }
      yield decoding.push(token);
    }
  }

  /**
   * Say something in the model's own format, and read the reply as it comes. The state carries the
   * dialogue, so that only the new turn is read; `system` comes before the first one. Settings that are
   * not given are those of the model's authors.
   */
  async *chat(text: string, { system, ...sampling }: Sampling & { system?: string } = {}): AsyncGenerator<string, void, void> {
    const ids = await chat.turn(this.#bundle, text, system, this.#position === 0);
    yield* this.generate(ids, { ...(await chat.defaults(this.#bundle)), ...sampling });
  }

  /** Text that was held back, with U+FFFD for an incomplete character. */
  flush(): string {
    return flush(this.#tail);
  }

  /** Go back to where the stream began. */
  reset(): void {
    this.#refuseBusy();
    if (this.#start) this.#restore(this.#start);
    else {
      this.#take(this.#bundle.initialStates(1));
      [this.#position, this.#outputs, this.#recent, this.#tail] = [0, null, [], noTail()];
    }
  }

  /** A second stream in the same state; each goes its own way from here. */
  fork(): Stream {
    this.#refuseBusy();
    const twin = new Stream(this.#bundle);
    // A call makes new tensors, and never writes to those that it reads.
    [twin.#states, twin.#position, twin.#outputs] = [this.#states, this.#position, this.#outputs];
    [twin.#recent, twin.#tail, twin.#start] = [this.#recent, { ...this.#tail }, this.#start];
    this.#lent = twin.#lent = true;
    return twin;
  }

  /** The bytes of a state file, which any runner of the model can go on from. */
  async save(): Promise<Uint8Array> {
    this.#refuseBusy();
    const { manifest, variant } = this.#bundle;
    if (!this.#outputs) throw new EdgelinError("the stream has read nothing yet, so there is no state to save");
    const tensors = this.states();
    tensors.set(manifest.output.name, { shape: [1, this.#outputs.length], data: this.#outputs });
    const text = manifest.tokenizer ? { recent: this.#recent, tail: this.#tail } : null;
    return stateFile.write({ modelHash: manifest.model_hash, variant, position: this.#position, text, tensors });
  }

  /** Go to the state of a file; nothing is read again. */
  async load(bytes: Uint8Array, where = "the state file"): Promise<void> {
    const saved = await stateFile.read(bytes, where);
    this.#refuseBusy();
    stateFile.check(saved, where, this.#bundle.manifest, 1);
    if (saved.variant !== this.#bundle.variant) {
      console.warn(`${where} was saved by variant ${saved.variant} and goes on with ${this.#bundle.variant}; the outputs may differ`);
    }
    this.#restore(saved);
  }

  /** Begin in a capsule, where `reset` goes back to. */
  begin(saved: stateFile.Saved, where: string): void {
    stateFile.check(saved, where, this.#bundle.manifest, 1);
    this.#start = saved;
    this.#restore(saved);
  }

  #restore(saved: stateFile.Saved): void {
    const { manifest } = this.#bundle;
    const tensor = (name: string): Tensor => {
      const { data, shape } = saved.tensors.get(name)!;
      return this.#bundle.tensor(data, shape);
    };
    this.#take(manifest.states.map((spec) => tensor(spec.name)));
    this.#lent = true; // a capsule is gone back to
    this.#position = saved.position;
    this.#outputs = saved.tensors.get(manifest.output.name)!.data as Float32Array;
    this.#recent = [...(saved.text?.recent ?? [])];
    this.#tail = saved.text ? { ...saved.text.tail } : noTail();
  }

  /** Go on from other states. */
  #take(states: Tensor[]): void {
    if (!this.#lent) this.#bundle.discard(this.#states);
    [this.#states, this.#lent] = [states, false];
  }

  async #feed(given: Steps, all: boolean): Promise<Float32Array> {
    const { manifest } = this.#bundle;
    if (typeof given !== "object" || !(Symbol.iterator in (given ?? {}))) throw new EdgelinError("steps are no list; give token ids, or a list of numbers for every step");
    const steps = [...(given as readonly number[])];
    if (steps.length === 0) throw new EdgelinError("there is nothing to read; give one step or more");
    const [size, answers] = [outputSize(manifest), new Float32Array(all ? steps.length * outputSize(manifest) : 0)];
    let [states, outputs] = [this.#states, this.#outputs];
    for (let at = 0; at < steps.length; at += manifest.chunk) {
      const piece = steps.slice(at, at + manifest.chunk);
      const found = await this.#bundle.call(states, [piece], { keep: all ? 0 : 1 });
      const data = found.outputs.data as Float32Array;
      if (all) answers.set(data, at * size);
      outputs = data.length === size ? data : data.slice(-size);
      if (!areFinite(outputs)) {
        throw new EdgelinError(
          `the model's outputs are not finite after position ${this.#position + at}: the inputs are too large, or its weights are damaged`,
        );
      }
      if (states !== this.#states) this.#bundle.discard(states);
      states = found.states;
    }
    this.#take(states);
    this.#outputs = outputs;
    this.#position += steps.length;
    if (manifest.tokenizer) this.#recent = [...this.#recent, ...steps].slice(-WINDOW);
    return all ? answers : outputs!;
  }

  /** Two calls at a time would both go on from the same state. */
  async #alone<T>(work: () => Promise<T>): Promise<T> {
    this.#refuseBusy();
    this.#busy = true;
    try {
      return await work();
    } finally {
      this.#busy = false;
    }
  }

  #refuseBusy(): void {
    if (this.#busy) throw new EdgelinError("the stream is still reading; await the call before, or fork the stream first");
  }
}

/** Lets other tasks of this thread run; a browser's timer would wait 4 ms longer. */
function otherTasks(): Promise<void> {
  if (typeof setImmediate === "function") return new Promise((resolve) => setImmediate(resolve));
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/** Whether all are finite: a loop, since `every` costs a hundredth of a token's time. */
function areFinite(outputs: Float32Array): boolean {
  for (let i = 0; i < outputs.length; i++) if (!Number.isFinite(outputs[i])) return false;
  return true;
}

/** Shape and content of a state. */
function values(tensor: Tensor): stateFile.Values {
  return { shape: tensor.dims, data: tensor.data as Float32Array | BigInt64Array };
}
