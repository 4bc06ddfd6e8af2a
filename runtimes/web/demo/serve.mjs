/** A static file server on 127.0.0.1, for the demo page and the browser tests. */

import { createReadStream } from "node:fs";
import { stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";

const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json", ".wasm": "application/wasm" };

/** Serve folders under URL prefixes, such as `{"/golden/": "../golden"}`; gives `{ url, requests, close }`. */
export async function serve(folders, port = 0) {
  const requests = [];
  const server = createServer(async (request, response) => {
    const path = pathOf(request.url);
    if (path === null) return response.writeHead(400).end();
    requests.push(path);
    const prefix = Object.keys(folders).filter((key) => path.startsWith(key)).sort((a, b) => b.length - a.length)[0];
    const file = prefix && join(folders[prefix], normalize(`/${path.slice(prefix.length)}`));
    const found = file && (await stat(file).catch(() => null));
    if (!found?.isFile()) return response.writeHead(404).end();
    response.writeHead(200, { "Content-Type": TYPES[extname(file)] ?? "application/octet-stream", "Content-Length": found.size });
    createReadStream(file).pipe(response);
  });
  await new Promise((resolve, reject) => server.once("error", reject).listen(port, "127.0.0.1", resolve));
  const close = () => (server.closeAllConnections(), server.close());
  return { url: `http://127.0.0.1:${server.address().port}`, requests, close };
}

/** The path of a URL; null of one that is none, or has half an escape. */
function pathOf(url) {
  try {
    return decodeURIComponent(new URL(url, "http://x").pathname).replace(/\/$/, "/index.html");
  } catch {
    return null;
  }
}
