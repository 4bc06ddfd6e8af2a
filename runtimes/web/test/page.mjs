/** What the browser tests call inside a page or a worker. */

import { Store, load } from "../dist/web.js";
import { parse, replay } from "./golden.mjs";

const fetched = async (url) => (await fetch(url)).text();

globalThis.edgelin = {
  load,
  Store,
  /** Replay one golden stream; gives the name of the device. */
  async golden(folder, variant, options) {
    const bundle = await load(`${folder}/bundle`, { variant, wasmFolder: "/dist/", selfTest: "always", ...options });
    const golden = parse(await fetched(`${folder}/${variant}.json`));
    await replay(bundle, golden, async (file) => new Uint8Array(await (await fetch(`${folder}/${file}`)).arrayBuffer()));
    return bundle.device;
  },
  /** Least milliseconds of a token, and tokens a second, over `count` steps. */
  async measure(folder, options, count = 100) {
    const bundle = await load(folder, { wasmFolder: "/dist/", selfTest: "never", ...options });
    const stream = await bundle.stream({ capsule: "none" });
    const times = [];
    for (let i = 0; i < count; i++) {
      const begin = performance.now();
      await stream.feed([(i * 37 + 11) % bundle.manifest.input.vocab_size]);
      times.push(performance.now() - begin);
    }
    times.sort((a, b) => a - b);
    return { best: times[0], median: times[count >> 1] };
  },
};
globalThis.onmessage = async ({ data: [name, ...rest] }) => postMessage(await globalThis.edgelin[name](...rest).catch(String));
