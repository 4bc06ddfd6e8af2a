/** The model, in a worker: the page stays responsive while it computes. */

import { type Bundle, type Stream, load } from "edgelin";
import type { Answer, Request, Step, Writing } from "./messages.js";

const port = globalThis as unknown as { postMessage(answer: Answer): void; onmessage: (event: MessageEvent<Request>) => void };
const SEED = 1;
const SHOW_EVERY = 60; // ms between two messages with text

let bundle: Bundle | null = null;
let streams: Stream[] = [];
let paused = false;
const memories = watchMemory();

port.onmessage = ({ data }) => {
  if (data.do === "pause") paused = true;
  else void answer(data).catch((error: Error) => port.postMessage({ is: "failed", message: error.message }));
};

async function answer(request: Request): Promise<void> {
  if (request.do === "open") return open(request.source);
  const stream = streams["stream" in request ? request.stream : -1];
  if (!stream) throw new Error("no model is open yet");
  const number = streams.indexOf(stream);
  switch (request.do) {
    case "write":
      return write(stream, request);
    case "fork":
      streams.push(stream.fork());
      return port.postMessage({ is: "forked", from: number, stream: streams.length - 1 });
    case "save":
      return port.postMessage({ is: "saved", stream: number, bytes: await stream.save() });
    case "load":
      await stream.load(request.bytes);
      break;
    case "reset":
      stream.reset();
  }
  port.postMessage({ is: "loaded", stream: number, position: stream.position, stateBytes: stream.stateBytes });
}

async function open(source: Extract<Request, { do: "open" }>["source"]): Promise<void> {
  const wasmFolder = new URL(".", globalThis.location.href).href;
  const onProgress = (loaded: number, total: number): void => port.postMessage({ is: "progress", loaded, total });
  const opened = await load("url" in source ? source.url : source.files, { wasmFolder, onProgress });
  if (opened.manifest.input.kind !== "tokens") {
    await opened.release();
    throw new Error("this bundle reads features, not text; choose one of a language model");
  }
  await bundle?.release();
  [bundle, streams] = [opened, [await opened.stream()]];
  const { manifest, variant } = opened;
  const bytes = Object.values(manifest.variants[variant]!.files).reduce((sum, file) => sum + file.bytes, 0);
  const model = `${manifest.model_hash.slice(0, 12)}, variant ${variant}, ${(bytes / 1e6).toFixed(1)} MB, on ${opened.device}`;
  port.postMessage({ is: "open", model, name: manifest.model_hash });
}

async function write(stream: Stream, { prompt, tokens, temperature }: Writing): Promise<void> {
  const number = streams.indexOf(stream);
  const sampling = { maxTokens: tokens, temperature, seed: SEED };
  const fresh = stream.position === 0 && prompt === "";
  paused = false;
  let [text, steps, shown, count]: [string, Step[], number, number] = ["", [], performance.now(), 0];
  const show = (): void => {
    port.postMessage({ is: "wrote", stream: number, text, steps, stateBytes: stream.stateBytes });
    [text, steps, shown] = ["", [], performance.now()];
  };
  let last = stream.position;
  let begin = performance.now();
  for await (const piece of stream.generate(prompt === "" ? (fresh ? "\n" : null) : prompt, sampling)) {
    text += piece;
    // The first token waited for the prompt, and a document's end is no token that was read.
    if (count > 0 && stream.position > last) {
      steps.push({ position: stream.position, time: performance.now() - begin, memory: memory() });
    }
    if (stream.position > last) count++;
    last = stream.position;
    if (performance.now() - shown > SHOW_EVERY) show();
    if (paused) break; // generate lets messages in
    begin = performance.now();
  }
  show();
  const reason = paused ? "paused" : count === tokens ? "enough" : "ended";
  port.postMessage({ is: "done", stream: number, position: stream.position, stateBytes: stream.stateBytes, reason });
}

function memory(): number {
  return memories.reduce((sum, one) => sum + one.buffer.byteLength, 0);
}

/** The WebAssembly memories that are made from here on. */
function watchMemory(): WebAssembly.Memory[] {
  const made: WebAssembly.Memory[] = [];
  WebAssembly.Memory = new Proxy(WebAssembly.Memory, {
    construct(target, [descriptor]: [WebAssembly.MemoryDescriptor]) {
      made.push(new target(descriptor));
      return made.at(-1)!;
    },
  });
  return made;
}
