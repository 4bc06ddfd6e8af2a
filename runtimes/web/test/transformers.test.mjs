/** A bundle in transformers.js, whose folder layout it has: tokenizer, graph and generate(). */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { load } from "edgelin/node";
import { parse } from "./golden.mjs";

process.env.ORT_DISABLE_TELEMETRY ??= "1";
const { AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, Tensor, env } = await import("@huggingface/transformers");
const GOLDEN = fileURLToPath(new URL("../../golden/", import.meta.url));
Object.assign(env, { allowRemoteModels: false, localModelPath: GOLDEN });

/** The states of a manifest before the first step, by which generate() goes on. */
class States extends DynamicCache {
  #calls = 0;

  constructor(bundle) {
    const tensors = bundle.initialStates(1).map(({ type, data, dims }) => new Tensor(type, data, dims));
    super(Object.fromEntries(bundle.manifest.states.map((spec, i) => [spec.input, tensors[i]])));
  }

  /** Calls so far: generate() only asks whether there was one. */
  get_seq_length() {
    return this.#calls;
  }

  update(found) {
    // transformers.js takes any `present` that it does not know for keys and values.
    super.update(Object.fromEntries(Object.entries(found).map(([name, tensor]) => [name.replace(/^past_key_values(?=_|$)/, "past"), tensor])));
    this.#calls++;
  }
}

/** Any class of plain decoders does: the graph and the states are given. */
const open = (name, dtype) => LlamaForCausalLM.from_pretrained(`${name}/bundle`, { dtype });

for (const [name, dtype, variant] of [
  ["fused", "fp32", "model"], ["fused", "q4", "model_q4"], ["plain", "fp32", "model"], ["complex", "fp32", "model"],
  ["hybrid", "fp32", "model"], ["growing", "fp32", "model"],
]) {
  test(`generate() of transformers.js on ${name}, ${dtype}`, async () => {
    const golden = parse(await readFile(join(GOLDEN, name, `${variant}.json`), "utf8"));
    const bundle = await load(join(GOLDEN, name, "bundle"), { variant });
    const tokenizer = await AutoTokenizer.from_pretrained(`${name}/bundle`);
    const inputs = tokenizer(golden.text.prompt);
    const ids = inputs.input_ids.tolist()[0].map(Number);
    assert.deepEqual(ids, golden.text.ids);
    assert.ok(ids.length <= bundle.manifest.max_time, "a longer prompt would be cut into calls");

    const model = await open(name, dtype);
    const made = await model.generate({ ...inputs, past_key_values: new States(bundle), max_new_tokens: 24, do_sample: false });
    const stream = await bundle.stream({ capsule: "none" });
    const wanted = [...ids];
    await stream.feed(ids);
    while (wanted.length < ids.length + 24 && wanted.at(-1) !== 0) {
      const best = stream.outputs.indexOf(Math.max(...stream.outputs));
      wanted.push(best);
      await stream.feed([best]);
    }
    assert.deepEqual(made.tolist()[0].map(Number), wanted);
  });
}

test("what transformers.js does not do by itself", async () => {
  await assert.rejects(AutoModelForCausalLM.from_pretrained("fused/bundle", { dtype: "fp32" }), /Unsupported model type: edgelin/);
  const [model, tokenizer] = [await open("fused", "fp32"), await AutoTokenizer.from_pretrained("fused/bundle")];
  await assert.rejects(model.generate({ ...tokenizer("The"), max_new_tokens: 4 }), /past_conv\.0/); // without States
});
