/** What the page and the worker say to each other. */

export type Source = { url: string } | { files: Map<string, Blob> };

export interface Writing {
  stream: number;
  /** What the user wrote; empty to just go on. */
  prompt: string;
  tokens: number;
  temperature: number;
}

export type Request =
  | { do: "open"; source: Source }
  | ({ do: "write" } & Writing)
  | { do: "pause" }
  | { do: "fork"; stream: number }
  | { do: "save"; stream: number }
  | { do: "load"; stream: number; bytes: Uint8Array }
  | { do: "reset"; stream: number };

export interface Step {
  position: number;
  /** Time of the token in ms. */
  time: number;
  /** WebAssembly memory in bytes. */
  memory: number;
}

export type Answer =
  | { is: "progress"; loaded: number; total: number }
  | { is: "open"; model: string; name: string }
  | { is: "wrote"; stream: number; text: string; steps: Step[]; stateBytes: number }
  | { is: "done"; stream: number; position: number; stateBytes: number; reason: "paused" | "enough" | "ended" }
  | { is: "forked"; from: number; stream: number }
  | { is: "saved"; stream: number; bytes: Uint8Array }
  | { is: "loaded"; stream: number; position: number; stateBytes: number }
  | { is: "failed"; message: string };
