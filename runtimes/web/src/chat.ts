/**
 * Dialogue in a model's own format: its chat template, rendered as transformers does ("A dialogue" in
 * the contract). Templates come from strangers; @huggingface/jinja interprets them without access to
 * anything but the messages. What a user says cannot become a special token, whatever it spells.
 */

import { Template } from "@huggingface/jinja";
import { EdgelinError, oneLine } from "./errors.js";
import type { Bundle } from "./runner.js";
import type { Sampling } from "./sampler.js";
import type { TextCodec } from "./text.js";

export interface Message {
  role: string;
  content: string;
}

/** Ids of the user's next turn; `first` if the dialogue begins, else the stream stands in a reply. */
export function turn(bundle: Bundle, text: string, system: string | undefined, first: boolean): Promise<number[]> {
  if (text.trim() === "") throw new EdgelinError("the turn is empty; say something of at least one character");
  if (system !== undefined && !first) throw new EdgelinError("the dialogue has begun already; a system text comes before it");
  const told = system === undefined ? [] : [{ role: "system", content: system }];
  return dialogue(bundle, [...told, { role: "user", content: text }], first);
}

/** Ids of a dialogue, up to where the next reply begins. */
export async function dialogue(bundle: Bundle, messages: readonly Message[], first: boolean): Promise<number[]> {
  const codec = await bundle.text();
  const { chat_template: path, chat_tokens = {}, special_tokens = {} } = bundle.manifest.tokenizer!;
  if (!path) throw new EdgelinError("the bundle has no chat template; give a plain prompt instead");
  const template = new TextDecoder().decode(await bundle.file(path));
  const [words, mark] = [new Words(codec, special_tokens), unique()];
  const said = messages.map((message) => ({ ...message, content: words.protect(message.content) }));
  if (!first) said.unshift({ role: "user", content: "." }, { role: "assistant", content: mark });
  const rendered = render(template, said, chat_tokens, path);
  if (first) return words.encode(rendered);
  const parts = rendered.split(mark);
  if (parts.length !== 2) throw new EdgelinError(`${path} does not show the last reply as it was; begin a new stream for every turn`);
  return words.encode(parts[1]!);
}

/** The text of a dialogue and the beginning of the model's reply. */
export function render(template: string, messages: readonly Message[], tokens: Readonly<Record<string, string>>, where = "the template"): string {
  try {
    return new Template(template).render({ messages, add_generation_prompt: true, ...tokens });
  } catch (error) {
    throw new EdgelinError(`${where} cannot be rendered: ${oneLine(error)}; use another prompt`);
  }
}

/** Settings of the sampler that the model's authors recommend. */
export async function defaults(bundle: Bundle): Promise<Sampling> {
  const name = "generation_config.json";
  if (!(name in bundle.manifest.files)) return {};
  const values = JSON.parse(new TextDecoder().decode(await bundle.file(name))) as Record<string, number | boolean | null>;
  if (values["do_sample"] === false) return { temperature: 0 };
  const names = { temperature: "temperature", top_k: "topK", top_p: "topP", min_p: "minP", repetition_penalty: "repetitionPenalty" };
  const given = Object.entries(names).map(([theirs, ours]) => [ours, values[theirs]]);
  return Object.fromEntries(given.filter(([, value]) => typeof value === "number")) as Sampling;
}

/** Keeps what a user says apart from the special tokens of the template. */
class Words {
  readonly #cut = unique();
  readonly #names: RegExp;

  constructor(
    readonly codec: TextCodec,
    readonly special: Readonly<Record<string, number>>,
  ) {
    const longestFirst = Object.keys(special).sort((a, b) => b.length - a.length);
    const names = longestFirst.map((name) => name.replace(/[^\p{L}\p{N}_ ]/gu, (sign) => `\\u{${sign.codePointAt(0)!.toString(16)}}`));
    this.#names = new RegExp(`(?:${names.join("|") || "(?!)"})(?!${this.#cut})`, "gu");
  }

  /** The text with a mark in every special token that it spells. */
  protect(text: string): string {
    return text.replace(this.#names, (name) => {
      const head = String.fromCodePoint(name.codePointAt(0)!);
      return head + this.#cut + name.slice(head.length);
    });
  }

  /** Ids of a rendered text; where a mark is, the user's own words. */
  encode(text: string): number[] {
    if (!text.includes(this.#cut)) return this.codec.encode(text, false);
    const ids: number[] = [];
    let end = 0;
    for (const found of text.matchAll(this.#names)) {
      ids.push(...this.#plain(text.slice(end, found.index)), ...this.codec.encode(found[0], false));
      end = found.index + found[0].length;
    }
    return [...ids, ...this.#plain(text.slice(end))];
  }

  /** Ids without those of the special tokens that the text spells. */
  #plain(text: string): number[] {
    const whole = text.replaceAll(this.#cut, "");
    const spelled = new Set(whole.match(this.#names)?.map((name) => this.special[name]));
    const ids = this.codec.encodePlain(whole);
    if (!ids.some((id) => spelled.has(id))) return ids;
    // The vocabulary itself has the name as a word (Unigram does): have it spelled in two parts.
    const parts = text.split(this.#cut).flatMap((part) => this.codec.encodePlain(part));
    return parts.filter((id) => !spelled.has(id));
  }
}

/** Letters that no text has. */
function unique(): string {
  const digits = [...crypto.getRandomValues(new Uint32Array(2))].map((part) => part.toString(16).padStart(8, "0"));
  return `\ue000${digits.join("")}\ue001`;
}
