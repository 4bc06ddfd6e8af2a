/** Decoding speed of a stream, in Node and in the browser. */

/** Tokens a second over `count` tokens that are drawn as {@link Stream.generate} draws by default. */
export async function decode(stream, count) {
  const begin = performance.now();
  // A model that ends its text is asked again with another seed.
  for (let made = 0, seed = 0; made < count; seed++) {
    for await (const _ of stream.generate(null, { maxTokens: count - made, seed })) made++;
  }
  return (1000 * count) / (performance.now() - begin);
}
