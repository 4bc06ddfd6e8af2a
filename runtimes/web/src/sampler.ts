/**
 * Choosing the next token from logits: repetition penalty, temperature, top-k, top-p, min-p, in the
 * order of Hugging Face, on float64. The random number of a position depends on the seed and the
 * position alone (splitmix64), so that a stream that was saved goes on the same in any language.
 */

import { EdgelinError, checkNames } from "./errors.js";

export const WINDOW = 64; // tokens that the repetition penalty looks back
const MASK = (1n << 64n) - 1n;

export interface Sampling {
  /** Tokens to generate at most; 256. */
  maxTokens?: number;
  /** Divides the logits; 0 takes the likeliest token; 0.8. */
  temperature?: number;
  /** Keeps the k likeliest tokens; 0 keeps all; 40. */
  topK?: number;
  /** Keeps the fewest tokens whose probabilities reach it; 1 keeps all; 0.95. */
  topP?: number;
  /** Keeps tokens at least so many times as likely as the likeliest; 0. */
  minP?: number;
  /** Above 1 makes the last 64 tokens less likely; 1. */
  repetitionPenalty?: number;
  /** Makes sampling repeatable; drawn anew if not given. */
  seed?: number | bigint;
  /** Strings (or one string) that end the text and are no part of it. */
  stop?: string | readonly string[];
}

export interface Settings {
  maxTokens: number;
  temperature: number;
  topK: number;
  topP: number;
  minP: number;
  repetitionPenalty: number;
  seed: bigint;
  stop: readonly string[];
}

/** Settings with every default filled in; throws where one is out of range. */
export function settings(given: Sampling): Settings {
  const need = (good: boolean, name: string, allowed: string): void => {
    if (!good) throw new EdgelinError(`${name} is ${String(given[name as keyof Sampling])}; ${allowed} is allowed`);
  };
  checkNames(given, "setting", ["maxTokens", "temperature", "topK", "topP", "minP", "repetitionPenalty", "seed", "stop"]);
  const drawn = crypto.getRandomValues(new Uint32Array(1))[0]!;
  const {
    maxTokens = 256, temperature = 0.8, topK = 40, topP = 0.95, minP = 0, repetitionPenalty = 1, seed = drawn, stop = [],
  } = given;
  const whole = (value: number): boolean => Number.isSafeInteger(value) && value >= 0;
  need(whole(maxTokens), "maxTokens", "a whole number, 0 or more,");
  need(whole(topK), "topK", "a whole number, 0 (off) or more,");
  need(Number.isFinite(temperature) && temperature >= 0, "temperature", "0 or more");
  need(topP > 0 && topP <= 1, "topP", "above 0 and at most 1");
  need(minP >= 0 && minP <= 1, "minP", "0 .. 1");
  need(Number.isFinite(repetitionPenalty) && repetitionPenalty > 0, "repetitionPenalty", "above 0");
  need(typeof seed === "bigint" ? seed >= 0n && seed <= MASK : whole(seed), "seed", "a whole number 0 .. 2^64 - 1");
  const stops = typeof stop === "string" ? [stop] : [...stop];
  need(stops.every((text) => typeof text === "string" && text !== ""), "stop", "texts of one character or more");
  return { maxTokens, temperature, topK, topP, minP, repetitionPenalty, seed: BigInt(seed), stop: stops };
}

/** The next token after `position` tokens, of which `recent` are the last. */
export function choose(logits: Float32Array, recent: readonly number[], position: number, options: Settings): number {
  const scores = new Float64Array(logits);
  if (options.repetitionPenalty !== 1) penalise(scores, recent, options.repetitionPenalty);
  if (options.temperature === 0) return best(scores);
  temper(scores, options.temperature);
  const tokens = candidates(scores, options.topK);
  const first = scores[tokens[0]!]!;
  const weights = tokens.map((token) => Math.exp(scores[token]! - first));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const cumulative: number[] = [];
  let keep = 0;
  for (let sum = 0; keep < tokens.length; keep++) {
    const probability = weights[keep]! / total;
    // Sorted downwards: once one is too small, all others are.
    if (keep > 0 && probability < (options.minP * weights[0]!) / total) break;
    if (keep > 0 && options.topP < 1 && sum >= options.topP) break;
    cumulative.push((sum += probability));
  }
  const drawn = uniform(options.seed, position) * cumulative[keep - 1]!;
  const at = cumulative.findIndex((sum) => sum > drawn);
  return tokens[at < 0 ? keep - 1 : at]!;
}

/** The `position`-th output of splitmix64 started at `seed`, as a number in [0, 1). */
export function uniform(seed: bigint, position: number): number {
  let z = (seed + (BigInt(position) + 1n) * 0x9e3779b97f4a7c15n) & MASK;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return Number((z ^ (z >> 31n)) >> 11n) * 2 ** -53;
}

function penalise(scores: Float64Array, recent: readonly number[], penalty: number): void {
  for (const token of new Set(recent)) {
    const changed = scores[token]! > 0 ? scores[token]! / penalty : scores[token]! * penalty;
    scores[token] = Math.min(Math.max(changed, -Number.MAX_VALUE), Number.MAX_VALUE);
  }
}

/** Divide by the temperature, or take the limit for one so small that this overflows. */
function temper(scores: Float64Array, temperature: number): void {
  const largest = scores[best(scores)]!;
  const shift = Number.isFinite(Math.abs(largest) / temperature) ? 0 : largest;
  for (let i = 0; i < scores.length; i++) {
    scores[i] = Math.max((scores[i]! - shift) / temperature, -Number.MAX_VALUE);
  }
}

function best(scores: Float64Array): number {
  let at = 0;
  for (let i = 1; i < scores.length; i++) if (scores[i]! > scores[at]!) at = i;
  return at;
}

/** The `topK` best tokens (all for 0), best first, the lower id of equals first. */
function candidates(scores: Float64Array, topK: number): number[] {
  if (topK === 0 || topK >= scores.length) {
    const all = Array.from(scores.keys());
    return all.sort((a, b) => scores[b]! - scores[a]! || a - b);
  }
  const found: number[] = [];
  for (let i = 0; i < scores.length; i++) {
    if (found.length === topK) {
      if (scores[i]! <= scores[found[topK - 1]!]!) continue;
      found.pop();
    }
    let at = found.length;
    while (at > 0 && scores[found[at - 1]!]! < scores[i]!) at--;
    found.splice(at, 0, i);
  }
  return found;
}
