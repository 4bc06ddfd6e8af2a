/** Text in and out: encoding, decoding of tokens that split characters, stop strings. */

import { Tokenizer } from "@huggingface/tokenizers";
import { EdgelinError, oneLine } from "./errors.js";

/** What a stream has generated but not yet shown. */
export interface TextTail {
  /** First bytes of a character whose other bytes are still to come. */
  pending: Uint8Array;
  /** Text that may turn out to be the beginning of a stop string. */
  held: string;
}

export const noTail = (): TextTail => ({ pending: new Uint8Array(0), held: "" });

interface Description {
  model: { vocab: Record<string, number> | [string, number][] };
  added_tokens?: { id: number; content: string; special: boolean }[];
  decoder: Decoder | null;
}
interface Decoder {
  type: string;
  decoders?: Decoder[];
}

/** Token ids from text, and the bytes of every token. */
export class TextCodec {
  readonly #tokenizer: Tokenizer;
  readonly #plain: Tokenizer;
  readonly #bytes: Uint8Array[] = [];

  /** Reads `tokenizer.json`; refuses one that it does not know or that another model has. */
  static read(tokenizerJson: Uint8Array, tokenizerConfig: Uint8Array | null, vocabSize: number): TextCodec {
    try {
      return new TextCodec(tokenizerJson, tokenizerConfig, vocabSize);
    } catch (error) {
      if (error instanceof EdgelinError) throw error;
      throw new EdgelinError(`tokenizer.json is no tokenizer that this runner knows: ${oneLine(error)}; export the bundle again`);
    }
  }

  private constructor(tokenizerJson: Uint8Array, tokenizerConfig: Uint8Array | null, vocabSize: number) {
    const parse = (bytes: Uint8Array): unknown => JSON.parse(new TextDecoder().decode(bytes));
    const description = parse(tokenizerJson) as Description;
    const config = (tokenizerConfig ? parse(tokenizerConfig) : {}) as object;
    const words = { ...description, added_tokens: (description.added_tokens ?? []).filter(({ special }) => !special) };
    [this.#tokenizer, this.#plain] = [new Tokenizer(description, config), new Tokenizer(words, config)];
    const decoder = description.decoder;
    if (!["ByteLevel", "ByteFallback", "Metaspace"].some((kind) => uses(decoder, kind))) {
      throw new EdgelinError("tokenizer.json has a decoder that is not known; ByteLevel, ByteFallback or Metaspace is needed");
    }
    const toBytes = uses(decoder, "ByteLevel") ? byteLevel : metaspace;
    const { vocab } = description.model;
    const pairs = Array.isArray(vocab)
      ? vocab.map(([token], id): [string, number] => [token, id])
      : Object.entries(vocab);
    for (const [token, id] of pairs) this.#bytes[id] = toBytes(token);
    for (const { id, content, special } of description.added_tokens ?? []) {
      this.#bytes[id] = special ? new Uint8Array(0) : new TextEncoder().encode(content);
    }
    if (this.#bytes.length > vocabSize) {
      throw new EdgelinError(
        `tokenizer.json has token id ${this.#bytes.length - 1}, the model only 0 .. ${vocabSize - 1}; it belongs to another model`,
      );
    }
  }

  /** Token ids of a text; with `start`, those that begin a stream come first. */
  encode(text: string, start: boolean): number[] {
    if (/\p{Surrogate}/u.test(text)) throw new EdgelinError("the text is not valid Unicode: remove the unpaired surrogate");
    return this.#tokenizer.encode(text, { add_special_tokens: start }).ids;
  }

  /** Token ids of a text in which the names of special tokens are ordinary words. */
  encodePlain(text: string): number[] {
    return text === "" ? [] : this.#plain.encode(text, { add_special_tokens: false }).ids;
  }

  /** UTF-8 bytes that a reader sees of a token: none for special tokens and unused ids. */
  tokenBytes(token: number): Uint8Array {
    return this.#bytes[token] ?? new Uint8Array(0);
  }
}

/** Turns generated tokens into text that can be shown at once; keeps the rest in `tail`. */
export class TextDecoding {
  stopped = false;

  constructor(readonly codec: TextCodec, readonly tail: TextTail, readonly stops: readonly string[]) {}

  /** Take one token; gives the text that is certain now, perhaps none. */
  push(token: number): string {
    const bytes = join(this.tail.pending, this.codec.tokenBytes(token));
    const whole = bytes.length - incomplete(bytes);
    const text = this.tail.held + utf8(bytes.subarray(0, whole));
    this.tail.pending = bytes.slice(whole);
    const cuts = this.stops.map((stop) => text.indexOf(stop)).filter((at) => at >= 0);
    if (cuts.length > 0) {
      this.stopped = true;
      Object.assign(this.tail, noTail());
      return text.slice(0, Math.min(...cuts));
    }
    const shown = text.length - possibleStart(text, this.stops);
    this.tail.held = text.slice(shown);
    return text.slice(0, shown);
  }
}

/** The held text, with U+FFFD for a character that will not be completed; empties the tail. */
export function flush(tail: TextTail): string {
  const text = tail.held + utf8(tail.pending);
  Object.assign(tail, noTail());
  return text;
}

/** How many bytes at the end begin a character that is not complete. */
export function incomplete(bytes: Uint8Array): number {
  for (let size = Math.min(3, bytes.length); size > 0; size--) {
    try {
      const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
      if (strict.decode(bytes.subarray(bytes.length - size), { stream: true }) === "") return size;
    } catch {
      // not the beginning of a character
    }
  }
  return 0;
}

function utf8(bytes: Uint8Array): string {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}

function join(one: Uint8Array, other: Uint8Array): Uint8Array {
  const both = new Uint8Array(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}

/** Length of the longest end of `text` with which a stop string could begin. */
function possibleStart(text: string, stops: readonly string[]): number {
  let longest = 0;
  for (const stop of stops) {
    for (let size = Math.min(stop.length - 1, text.length); size > longest; size--) {
      if (text.endsWith(stop.slice(0, size))) longest = size;
    }
  }
  return longest;
}

function uses(decoder: Decoder | null | undefined, kind: string): boolean {
  return decoder?.type === kind || (decoder?.decoders ?? []).some((part) => uses(part, kind));
}

/** The character by which GPT-2's byte-level BPE writes a byte, to the byte. */
const ALPHABET = new Map<string, number>();
for (let byte = 0, others = 0; byte < 256; byte++) {
  const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  ALPHABET.set(String.fromCodePoint(printable ? byte : 256 + others++), byte);
}

function byteLevel(token: string): Uint8Array {
  return Uint8Array.from(token, (character) => ALPHABET.get(character) ?? 0);
}

function metaspace(token: string): Uint8Array {
  const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(token);
  if (byte) return Uint8Array.of(Number.parseInt(byte[1]!, 16));
  return new TextEncoder().encode(token.replaceAll("\u2581", " "));
}
