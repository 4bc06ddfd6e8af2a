/** What the browser tests call inside a page or a worker. */

import { Store, load } from "../dist/web.js";
import { decode } from "./decode.mjs";
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
  /** A stream for {@link decode}, which has read a token. */
  async begin(folder, options) {
    const bundle = await load(folder, { wasmFolder: "/dist/", selfTest: "never", ...options });
    globalThis.stream = await bundle.stream({ capsule: "none" });
    await stream.feed([1]);
    return bundle.variant;
  },
  decode: (count) => decode(stream, count),
};
globalThis.onmessage = async ({ data: [name, ...rest] }) => postMessage(await globalThis.edgelin[name](...rest).catch(String));
