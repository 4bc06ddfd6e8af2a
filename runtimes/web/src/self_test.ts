/** The device self-test: replays the golden stream that every bundle carries. */

import { EdgelinError } from "./errors.js";
import type { Bundle } from "./runner.js";

export const FILE_NAME = "golden.json";

interface Golden {
  pieces: { ids?: number[]; features?: number[][]; top: { ids: number[]; logits: number[] } }[];
  tolerance: Record<string, { logits: number; states: number }>;
}

/** Throws where this device answers otherwise than the bundle allows. */
export async function selfTest(bundle: Bundle): Promise<void> {
  const golden = JSON.parse(new TextDecoder().decode(await bundle.file(FILE_NAME))) as Golden;
  const allowed = golden.tolerance[bundle.variant]!.logits;
  const stream = await bundle.stream({ capsule: "none" });
  for (const [number, { ids, features, top }] of golden.pieces.entries()) {
    const outputs = await stream.feed((ids ?? features)!);
    const furthest = Math.max(...top.ids.map((id, i) => Math.abs(outputs[id]! - top.logits[i]!)));
    if (!(furthest <= allowed)) {
      throw new EdgelinError(
        `golden stream: outputs after piece ${number} are off by ${furthest.toPrecision(2)}, ${allowed.toPrecision(2)} is ` +
          `allowed; this device (${bundle.device}) computes otherwise, or the bundle is damaged`,
      );
    }
  }
}
