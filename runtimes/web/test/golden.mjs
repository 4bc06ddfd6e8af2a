/** Replay of a golden stream, in Node and in the browser; see "Golden streams" in runtimes/README.md. */

/** Every golden stream: folder and variant. */
export const CASES = [
  ["fused", "model"], ["fused", "model_q8"], ["fused", "model_q4"], ["plain", "model"], ["portable", "model_quantized"], ["complex", "model"],
  ["hybrid", "model"], ["growing", "model"], ["features", "model"], ["streams", "model"],
];

/** Throws unless the bundle answers as it must; `read` gives the bytes of a file beside the golden one. */
export async function replay(bundle, golden, read) {
  const size = golden.calls[0].outputs.find(Boolean).length;
  let states = bundle.initialStates(golden.batch);
  for (const [number, call] of golden.calls.entries()) {
    const { lengths } = call;
    const found = await bundle.call(states, call.ids ?? call.features, lengths ? { lengths } : {});
    states = found.states;
    for (const [row, wanted] of call.outputs.entries()) {
      const got = found.outputs.data.slice(row * size, (row + 1) * size);
      if (wanted) compare(got, wanted, golden.tolerance, `call ${number}, row ${row}`);
    }
  }
  if (golden.state_file) await replayState(bundle, golden, await read(golden.state_file));
  for (const { state_file, ids, outputs } of golden.shorter ?? []) {
    const stream = await bundle.stream();
    await stream.load(await read(state_file));
    compare(await stream.feed(ids), outputs[0], golden.tolerance, state_file);
  }
}

/** What follows the state file: greedy and sampled text. */
async function replayState(bundle, golden, state) {
  const stream = await bundle.stream();
  await stream.load(state);
  compare(stream.outputs, golden.calls.at(-1).outputs[0], { outputs: 0 }, "the state file");
  for (const wanted of [golden.greedy, golden.sampled].filter(Boolean)) {
    const twin = stream.fork();
    if ("kl" in golden.tolerance) await twin.feed(wanted.ids);
    else {
      const pieces = [];
      const sampling = { maxTokens: wanted.ids.length, ...(wanted.settings ? sampled(wanted.settings) : { temperature: 0 }) };
      for await (const piece of twin.generate(null, sampling)) pieces.push(piece);
      equal(pieces, wanted.pieces, "pieces of text");
    }
    compare(twin.outputs, wanted.outputs[0], golden.tolerance, "after generated tokens");
    const again = await bundle.stream();
    await again.load(await twin.save());
    equal([...again.outputs], [...twin.outputs], "outputs of a state that was saved");
  }
  if (golden.text) equal((await bundle.text()).encode(golden.text.prompt, true), golden.text.ids, "ids of the prompt");
}

function sampled({ seed, temperature, top_k, top_p, min_p, repetition_penalty }) {
  const big = BigInt(seed); // above 2^53: golden files are parsed with seedText
  return { seed: big, temperature, topK: top_k, topP: top_p, minP: min_p, repetitionPenalty: repetition_penalty };
}

/** JSON of a golden file; the seed stays a text, since a number would lose its last digits. */
export function parse(text) {
  return JSON.parse(text.replace(/"seed": (\d+)/, '"seed": "$1"'));
}

function compare(got, wanted, tolerance, where) {
  const furthest = Math.max(...wanted.map((value, i) => Math.abs(got[i] - Math.fround(value))));
  if (furthest <= tolerance.outputs) return;
  const kl = divergence(wanted, [...got]);
  if (!(kl <= (tolerance.kl ?? -1))) throw new Error(`${where}: outputs are off by ${furthest}, KL ${kl}; allowed ${JSON.stringify(tolerance)}`);
}

function divergence(wanted, got) {
  const logs = (row) => {
    const largest = Math.max(...row);
    const total = Math.log(row.reduce((sum, x) => sum + Math.exp(x - largest), 0)) + largest;
    return row.map((x) => x - total);
  };
  const [p, q] = [logs(wanted), logs(got)];
  return p.reduce((sum, value, i) => sum + Math.exp(value) * (value - q[i]), 0);
}

function equal(got, wanted, what) {
  if (JSON.stringify(got) !== JSON.stringify(wanted)) throw new Error(`${what} are ${JSON.stringify(got)}, wanted ${JSON.stringify(wanted)}`);
}
