/** Dialogues: chat templates beside Python's rendering of them. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { load } from "edgelin/node";
import { dialogue, render } from "../dist/chat.js";

const GOLDEN = fileURLToPath(new URL("../../golden/", import.meta.url));

/** The golden bundle, with a template and other files. */
async function talking(template, tokens, config = null) {
  const bundle = await load(join(GOLDEN, "fused", "bundle"), { variant: "model" });
  Object.assign(bundle.manifest.tokenizer, { chat_template: "chat_template.jinja", chat_tokens: tokens });
  const [file, extra] = [bundle.file.bind(bundle), new TextEncoder()];
  bundle.file = async (path, ...rest) => {
    if (path === "chat_template.jinja") return extra.encode(template);
    if (path === "generation_config.json" && config) return extra.encode(JSON.stringify(config));
    return file(path, ...rest);
  };
  return bundle;
}

test("golden dialogues: text and ids", async () => {
  const cases = JSON.parse(await readFile(join(GOLDEN, "dialogues.json"), "utf8"));
  assert.ok(cases.length >= 16);
  for (const { template: name, tokens, messages, text, ids, later } of cases) {
    const template = await readFile(join(GOLDEN, "templates", name), "utf8");
    assert.equal(render(template, messages, tokens), text, name);
    const bundle = await talking(template, tokens);
    assert.deepEqual(await bundle.dialogue(messages), ids, name);
    if (later) assert.deepEqual(await dialogue(bundle, messages, false), later, name);
  }
});

test("a stream keeps the dialogue", async () => {
  const template = await readFile(join(GOLDEN, "templates", "chatml.jinja"), "utf8");
  const bundle = await talking(template, {}, { do_sample: true, temperature: 0.7, top_k: 5, min_p: null });
  const said = async (pieces) => {
    let text = "";
    for await (const piece of pieces) text += piece;
    return text;
  };
  const [stream, byHand] = [await bundle.stream(), await bundle.stream()];
  const sampling = { seed: 3, maxTokens: 9 };
  const system = { role: "system", content: "S" };
  const ids = await bundle.dialogue([system, { role: "user", content: "Hello" }]);
  const wanted = await said(byHand.generate(ids, { ...sampling, temperature: 0.7, topK: 5 }));
  assert.equal(await said(stream.chat("Hello", { system: "S", ...sampling })), wanted);
  const before = stream.position;
  await said(stream.chat("More", sampling));
  const later = await dialogue(bundle, [{ role: "user", content: "More" }], false);
  assert.ok(stream.position >= before + later.length && stream.position <= before + later.length + 9);
  await assert.rejects(said(stream.chat("x", { system: "late" })), /a system text comes before it/);
  await assert.rejects(said(stream.chat(" ")), /the turn is empty/);
});

test("this year, a template that refuses, reaches out or is none, and a bundle without one", async () => {
  const messages = [{ role: "user", content: "x" }];
  assert.equal(render("{{ strftime_now('%Y') }}", messages, {}), String(new Date().getFullYear()));
  for (const template of ["{{ raise_exception('no') }}", "{% if %}", "{{ messages.constructor.constructor('return 1')() }}"]) {
    assert.throws(() => render(template, messages, {}, "t.jinja"), /^EdgelinError: t\.jinja cannot be rendered: [^\n]*$/, template);
  }
  const bundle = await load(join(GOLDEN, "fused", "bundle"), { variant: "model" });
  await assert.rejects(bundle.dialogue(messages), /no chat template/);
  const lost = await talking("{{ messages[-1].content }}", {});
  await assert.rejects(dialogue(lost, messages, false), /does not show the last reply/);
});
