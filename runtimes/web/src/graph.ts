/**
 * What is read of an ONNX file, and changed, before onnxruntime loads it.
 *
 * onnxruntime's JavaScript bindings feed no input that has a default value: Node's ignores it, the
 * web's throws. So the defaults are taken out of a graph before it is loaded, and always fed.
 */

import { concatBytes } from "@noble/hashes/utils.js";

const GRAPH = 7; // of a ModelProto
const METADATA = 14;
const [KEY, VALUE] = [1, 2]; // of a StringStringEntryProto
const INITIALIZER = 5; // of a GraphProto
const NAME = 8; // of a TensorProto
const BYTES = 2; // wire type with a length

interface Field {
  number: number;
  wire: number;
  /** First byte of its tag, of its content, and behind it. */
  begin: number;
  content: number;
  end: number;
}

/** The bytes of an ONNX model whose inputs of these names have no default values. */
export function withoutDefaults(model: Uint8Array, names: ReadonlySet<string>): Uint8Array {
  const isDefault = (graph: Uint8Array, field: Field): boolean =>
    field.number === INITIALIZER && names.has(nameOf(graph.subarray(field.content, field.end)));
  const parts: Uint8Array[] = [];
  for (const field of fields(model)) {
    if (field.number !== GRAPH || field.wire !== BYTES) {
      parts.push(model.subarray(field.begin, field.end));
      continue;
    }
    const graph = model.subarray(field.content, field.end);
    const kept = [...fields(graph)].filter((inner) => !isDefault(graph, inner));
    const size = kept.reduce((sum, inner) => sum + inner.end - inner.begin, 0);
    parts.push(Uint8Array.of((GRAPH << 3) | BYTES, ...varint(size)));
    parts.push(...kept.map((inner) => graph.subarray(inner.begin, inner.end)));
  }
  return concatBytes(...parts);
}

/** What an ONNX model carries under a key of its metadata; "" if nothing. */
export function metadata(model: Uint8Array, key: string): string {
  for (const field of fields(model)) {
    if (field.number !== METADATA || field.wire !== BYTES) continue;
    const entry = model.subarray(field.content, field.end);
    if (textOf(entry, KEY) === key) return textOf(entry, VALUE);
  }
  return "";
}

function nameOf(tensor: Uint8Array): string {
  return textOf(tensor, NAME);
}

/** A text field of a message; "" if it has none. */
function textOf(message: Uint8Array, number: number): string {
  for (const field of fields(message)) {
    if (field.number === number && field.wire === BYTES) return new TextDecoder().decode(message.subarray(field.content, field.end));
  }
  return "";
}

/** The fields of a protobuf message. */
function* fields(message: Uint8Array): Generator<Field> {
  let at = 0;
  const read = (): number => {
    for (let value = 0, scale = 1; ; scale *= 128) {
      const byte = message[at++];
      if (byte === undefined) throw new Error("the ONNX file is cut off");
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < message.length) {
    const begin = at;
    const tag = read();
    const wire = tag & 7;
    let content = at;
    if (wire === 0) read();
    else if (wire === 1) at += 8;
    else if (wire === 5) at += 4;
    else {
      const size = read();
      content = at;
      at += size;
    }
    yield { number: tag >>> 3, wire, begin, content, end: at };
  }
}

function varint(value: number): number[] {
  const bytes: number[] = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) + 128);
  return [...bytes, value];
}
