/** The device self-test: replays the golden stream that every bundle carries. */

import { DeviceError, EdgelinError, oneLine } from "./errors.js";
import type { Bundle } from "./runner.js";

export const FILE_NAME = "golden.json";

interface Golden {
  pieces: { ids?: number[]; features?: number[][]; top: { ids: number[]; logits: number[] } }[];
  states: Record<string, { max_abs: number; samples: [number, number][] }>;
  tolerance: Record<string, { logits: number; states: number }>;
}

/** Throws where this device answers otherwise than the bundle allows. */
export async function selfTest(bundle: Bundle): Promise<void> {
  const content = await bundle.file(FILE_NAME);
  try {
    await replay(bundle, JSON.parse(new TextDecoder().decode(content)) as Golden);
  } catch (error) {
    if (error instanceof EdgelinError) throw error;
    throw new EdgelinError(`${FILE_NAME} of the bundle cannot be replayed: ${oneLine(error)}; export the bundle again`);
  }
}

async function replay(bundle: Bundle, golden: Golden): Promise<void> {
  const allowed = golden.tolerance[bundle.variant]!;
  const stream = await bundle.stream({ capsule: "none" });
  const compare = (what: string, found: number[], wanted: number[], limit: number): void => {
    const furthest = Math.max(...found.map((value, i) => Math.abs(value - wanted[i]!)));
    if (furthest <= limit) return;
    throw new DeviceError(
      `golden stream: ${what} off by ${furthest.toPrecision(2)}, ${limit.toPrecision(2)} is allowed; this device ` +
        `(${bundle.device}) computes otherwise, or the bundle is damaged`,
    );
  };
  for (const [number, { ids, features, top }] of golden.pieces.entries()) {
    const outputs = await stream.feed((ids ?? features)!);
    compare(`outputs after piece ${number}`, top.ids.map((id) => outputs[id]!), top.logits, allowed.logits);
  }
  for (const [name, { data }] of stream.states()) {
    const { max_abs, samples } = golden.states[name]!;
    const limit = data instanceof Float32Array ? allowed.states * max_abs : 0;
    compare(`state ${name}`, samples.map(([at]) => Number(data[at])), samples.map(([, value]) => value), limit);
  }
}
