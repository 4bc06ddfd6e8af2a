/** The page: what the user sees and does. The model is in the worker. */

import { Store, download } from "edgelin";
import type { Answer, Request, Source, Step } from "./messages.js";
import { Plot, Series } from "./plot.js";

interface Piece {
  text: string;
  yours: boolean;
}
/** A stream as the page shows it. */
interface Shown {
  name: string;
  pieces: Piece[];
  position: number;
  stateBytes: number;
  times: Series;
  memories: Series;
}

const element = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
const button = (id: string): HTMLButtonElement => element(id);
const input = (id: string): HTMLInputElement => element(id);
const CONTROLS = ["go", "fork", "save", "restore", "download", "upload", "reset"];
const MIB = 2 ** 20;

const worker = new Worker("worker.js", { type: "module" });
const timePlot = new Plot(element("time-plot"), "Milliseconds a token");
const memoryPlot = new Plot(element("memory-plot"), "MiB of memory");
const store = Store.open("edgelin-demo");

let shown: Shown[] = [];
let current = 0;
let model = "";
let busy = true;
let recent: number[] = []; // times of the last tokens
let waiting = ""; // what was written while the model was busy
let keeping: "save" | "download" = "save";

const ask = (request: Request): void => worker.postMessage(request);

function say(text: string, error = false): void {
  element("status").textContent = text;
  element("status").classList.toggle("error", error);
}

function open(source: Source): void {
  setBusy(true);
  element("progress").hidden = false;
  say("Loading the model …");
  ask({ do: "open", source });
}

worker.onmessage = async ({ data }: MessageEvent<Answer>) => {
  switch (data.is) {
    case "progress":
      return element<HTMLProgressElement>("progress").setAttribute("value", String(data.loaded / data.total));
    case "open":
      model = data.name;
      shown = [{ name: "Stream 1", pieces: [], position: 0, stateBytes: 0, times: new Series(), memories: new Series() }];
      element("progress").hidden = true;
      element("model").textContent = data.model;
      say("The model is ready.");
      setBusy(false);
      return show(0);
    case "wrote":
      append(data.stream, { text: data.text, yours: false });
      shown[data.stream]!.stateBytes = data.stateBytes;
      return measured(data.stream, data.steps);
    case "done":
      Object.assign(shown[data.stream]!, { position: data.position, stateBytes: data.stateBytes });
      say({ paused: "Paused.", enough: "Done; it can go on.", ended: "The model ended its text." }[data.reason]);
      setBusy(false);
      figures();
      if (waiting) write();
      return;
    case "forked": {
      const from = shown[data.from]!;
      const pieces = from.pieces.map((piece) => ({ ...piece }));
      const series = { times: from.times.copy(), memories: from.memories.copy() };
      shown.push({ ...from, ...series, pieces, name: `Stream ${data.stream + 1}` });
      say(`Forked at position ${from.position}: both streams go on from the same state.`);
      return show(data.stream);
    }
    case "saved":
      return keep(data.bytes, shown[data.stream]!);
    case "loaded": {
      const fresh = { times: new Series(), memories: new Series() };
      Object.assign(shown[data.stream]!, { position: data.position, stateBytes: data.stateBytes, ...fresh });
      setBusy(false);
      return show(data.stream);
    }
    case "failed":
      element("progress").hidden = true;
      setBusy(shown.length === 0);
      return say(data.message, true);
  }
};

/** Go on writing, from what the user wrote if there is something. */
function write(): void {
  const prompt = waiting;
  waiting = "";
  if (prompt) append(current, { text: prompt, yours: true });
  setBusy(true);
  say("Writing …");
  ask({ do: "write", stream: current, prompt, tokens: input("tokens").valueAsNumber || 400, temperature: input("temperature").valueAsNumber || 0 });
}

element("write").addEventListener("submit", (event) => {
  event.preventDefault();
  const box = element<HTMLTextAreaElement>("prompt");
  waiting += box.value;
  box.value = "";
  if (busy) ask({ do: "pause" }); // goes on with what was written
  else write();
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    element<HTMLFormElement>("write").requestSubmit();
  }
});
button("pause").onclick = () => ask({ do: "pause" });
button("fork").onclick = () => ask({ do: "fork", stream: current });
button("save").onclick = () => {
  keeping = "save";
  ask({ do: "save", stream: current });
};
button("download").onclick = () => {
  keeping = "download";
  ask({ do: "save", stream: current });
};
button("restore").onclick = async () => {
  const bytes = await (await store).get(model);
  if (!bytes) return say("No state of this model is saved in this browser yet.", true);
  const text = await (await store).get(`${model} text`);
  shown[current]!.pieces = text ? (JSON.parse(new TextDecoder().decode(text)) as Piece[]) : [];
  ask({ do: "load", stream: current, bytes });
  say("Restored: it goes on exactly here; nothing is read again.");
};
button("upload").onclick = () => input("state-file").click();
input("state-file").onchange = async () => {
  const file = input("state-file").files?.[0];
  input("state-file").value = "";
  if (!file) return;
  shown[current]!.pieces = [{ text: `[state of ${file.name}] `, yours: true }];
  ask({ do: "load", stream: current, bytes: new Uint8Array(await file.arrayBuffer()) });
};
button("reset").onclick = () => {
  shown[current]!.pieces = [];
  ask({ do: "reset", stream: current });
  say("Back before the first token.");
};

/** Keep a state file in the browser, or as a download. */
async function keep(bytes: Uint8Array, stream: Shown): Promise<void> {
  const kilobytes = Math.round(bytes.length / 1000);
  if (keeping === "download") {
    download(bytes, `position-${stream.position}.state`);
    return say(`State file of ${kilobytes} kB downloaded; it goes on in any edgelin runner.`);
  }
  await (await store).put(model, bytes);
  await (await store).put(`${model} text`, new TextEncoder().encode(JSON.stringify(stream.pieces)));
  say(`Saved at position ${stream.position}: ${kilobytes} kB. It is here after a reload, too.`);
}

function append(stream: number, piece: Piece): void {
  if (piece.text === "") return;
  const { pieces } = shown[stream]!;
  const last = pieces.at(-1);
  if (last && last.yours === piece.yours) last.text += piece.text;
  else pieces.push({ ...piece });
  if (stream === current) showText();
}

function measured(stream: number, steps: readonly Step[]): void {
  for (const { position, time, memory } of steps) {
    shown[stream]!.position = position;
    recent = [...recent.slice(-49), time];
    shown[stream]!.times.add(position, time);
    shown[stream]!.memories.add(position, memory / MIB);
    element("memory").textContent = `${(memory / MIB).toFixed(1)} MiB`;
  }
  figures();
}

function figures(): void {
  const { position, stateBytes } = shown[current]!;
  const total = recent.reduce((sum, time) => sum + time, 0);
  element("speed").textContent = recent.length > 0 ? ((1000 * recent.length) / total).toFixed(0) : "–";
  element("position").textContent = position.toLocaleString("en");
  element("state").textContent = stateBytes ? `${stateBytes.toLocaleString("en")} bytes` : "–";
  timePlot.draw();
  memoryPlot.draw();
}

/** Show one of the streams. */
function show(stream: number): void {
  current = stream;
  const choices = shown.map(({ name }, number) => {
    const choice = document.createElement("button");
    Object.assign(choice, { type: "button", textContent: name, onclick: () => show(number), disabled: busy });
    choice.setAttribute("aria-pressed", String(number === stream));
    return choice;
  });
  element("streams").replaceChildren(...(choices.length > 1 ? choices : []));
  [timePlot.series, memoryPlot.series] = [shown[stream]!.times, shown[stream]!.memories];
  showText();
  figures();
}

function showText(): void {
  const box = element("text");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const spans = shown[current]!.pieces.map(({ text, yours }) => {
    const span = document.createElement("span");
    span.textContent = text;
    if (yours) span.className = "yours";
    return span;
  });
  box.replaceChildren(...spans);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function setBusy(value: boolean): void {
  busy = value;
  const opened = shown.length > 0;
  for (const id of CONTROLS) button(id).disabled = busy;
  button("go").disabled = !opened;
  button("pause").disabled = !busy || !opened;
  for (const choice of document.querySelectorAll<HTMLButtonElement>("#streams button")) choice.disabled = busy;
}

button("open").onclick = () => input("folder").click();
input("folder").onchange = () => {
  const files = [...(input("folder").files ?? [])];
  input("folder").value = "";
  if (files.length > 0) open({ files: new Map(files.map((file) => [file.webkitRelativePath, file])) });
};
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  element("drop").hidden = false;
});
document.addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) element("drop").hidden = true;
});
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  element("drop").hidden = true;
  const entries = [...(event.dataTransfer?.items ?? [])].map((item) => item.webkitGetAsEntry());
  const files = new Map<string, Blob>();
  for (const entry of entries) if (entry) await collect(entry, "", files);
  open({ files });
});

/** The files of a dropped folder by their paths. */
async function collect(entry: FileSystemEntry, folder: string, files: Map<string, Blob>): Promise<void> {
  const path = `${folder}${entry.name}`;
  if (entry.isFile) {
    files.set(path, await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject)));
    return;
  }
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  for (;;) {
    const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) return;
    for (const inner of some) await collect(inner, `${path}/`, files);
  }
}

matchMedia("(prefers-color-scheme: dark)").onchange = () => shown.length > 0 && figures();

const url = new URL(new URLSearchParams(location.search).get("bundle") ?? "bundle/", location.href).href;
open({ url });
