#!/usr/bin/env node
/** `edgelin-run BUNDLE "prompt"`: write on from a prompt, or from a saved state, in Node. */

import { readFile, rename, rm, writeFile } from "node:fs/promises";
import { parseArgs } from "node:util";
import { why } from "./errors.js";
import { EdgelinError, load, type Sampling } from "./node.js";

const USAGE = `Usage: edgelin-run BUNDLE ["prompt"] [options]

  --chat                    the prompt is a turn of a dialogue, in the model's own format
  --system TEXT             what the model is told before the first turn
  --variant NAME            graph of the bundle
  --max-tokens N            tokens to generate at most  [256]
  --temperature X           0 takes the likeliest token  [0.8]
  --top-k N  --top-p X  --min-p X  --repetition-penalty X
  --seed N                  makes sampling repeatable
  --stop TEXT               ends the text; may be given several times
  --load-state FILE         go on from a state file
  --save-state FILE         write one at the end
  --threads N               of onnxruntime
  --stats                   speed and state, on standard error
`;

const NUMBERS = {
  "max-tokens": "maxTokens", temperature: "temperature", "top-k": "topK", "top-p": "topP", "min-p": "minP",
  "repetition-penalty": "repetitionPenalty",
} as const;

async function main(): Promise<void> {
  const text = { type: "string" } as const;
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      variant: text, system: text, seed: text, threads: text, "load-state": text, "save-state": text,
      ...(Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, text])) as Record<keyof typeof NUMBERS, typeof text>),
      stop: { type: "string", multiple: true }, chat: { type: "boolean" }, stats: { type: "boolean" },
      help: { type: "boolean", short: "h" },
    },
  });
  const [folder, prompt, ...others] = positionals;
  if (values.help) return void process.stdout.write(USAGE);
  if (folder === undefined || others.length > 0) throw new EdgelinError(`give a bundle and a prompt; see edgelin-run --help`);
  const sampling: Sampling = { stop: values.stop ?? [] };
  for (const [name, key] of Object.entries(NUMBERS) as [keyof typeof NUMBERS, (typeof NUMBERS)[keyof typeof NUMBERS]][]) {
    if (values[name] !== undefined) sampling[key] = number(values[name], name);
  }
  if (values.seed !== undefined) {
    if (!/^\d{1,20}$/.test(values.seed)) throw new EdgelinError(`--seed is ${values.seed}; a whole number 0 .. 2^64 - 1 is needed`);
    sampling.seed = BigInt(values.seed);
  }
  const threads = values.threads === undefined ? {} : { threads: number(values.threads, "threads") };
  const bundle = await load(folder, { ...(values.variant === undefined ? {} : { variant: values.variant }), ...threads });
  const stream = await bundle.stream();
  const saved = values["load-state"];
  if (saved !== undefined) await stream.load(await content(saved), saved);
  if (values.chat && prompt === undefined) throw new EdgelinError("--chat needs a text: what you say to the model");
  if (values.system !== undefined && !values.chat) throw new EdgelinError("--system needs --chat");
  const system = values.system === undefined ? {} : { system: values.system };
  let [tokens, begin] = [0, NaN];
  for await (const piece of values.chat ? stream.chat(prompt!, { ...sampling, ...system }) : stream.generate(prompt, sampling)) {
    if (tokens++ === 0) begin = performance.now(); // the first token waits for the prompt
    process.stdout.write(piece);
  }
  const seconds = (performance.now() - begin) / 1000;
  const state = values["save-state"] === undefined ? undefined : await stream.save(); // as it is before the flush
  process.stdout.write(`${stream.flush()}\n`);
  if (state !== undefined) await replace(values["save-state"]!, state);
  if (values.stats) {
    const speed = tokens > 1 ? ((tokens - 1) / seconds).toFixed(1) : "-";
    console.error(`decode   ${tokens} tokens, ${speed} tokens/s`);
    console.error(`state    ${stream.stateBytes} bytes at position ${stream.position}`);
    console.error(`variant  ${bundle.variant}`);
  }
}

/** The bytes of a state file. */
async function content(path: string): Promise<Uint8Array> {
  try {
    return await readFile(path);
  } catch (error) {
    throw new EdgelinError(`the state file ${path} cannot be read: ${why(error)}; give one that was saved`);
  }
}

/** Write beside a file and rename, so that an older one stays whole until the new one is complete. */
async function replace(path: string, bytes: Uint8Array): Promise<void> {
  const part = `${path}.part`;
  try {
    await writeFile(part, bytes, { flush: true });
    await rename(part, path);
  } catch (error) {
    await rm(part, { force: true }).catch(() => undefined);
    throw new EdgelinError(`${path} cannot be written: ${why(error)}; give a file in a folder that exists and has room`);
  }
}

function number(text: string, name: string): number {
  const value = Number(text);
  if (text.trim() === "" || Number.isNaN(value)) throw new EdgelinError(`--${name} is ${text}; a number is needed`);
  return value;
}

process.stdout.on("error", (error) => { // a reader that went away, such as head, is no news
  if ((error as NodeJS.ErrnoException).code !== "EPIPE") console.error(`edgelin-run: the text cannot be written: ${why(error)}`);
  process.exit(1);
});
try {
  await main();
} catch (error) {
  const known = error instanceof EdgelinError || (error as NodeJS.ErrnoException).code !== undefined;
  if (!known) throw error;
  console.error(`edgelin-run: ${(error as Error).message.split("\n")[0]}`);
  process.exitCode = 1;
}
