/** An error that a user can cause: what was given, what is allowed, what to do next, on one line. */
export class EdgelinError extends Error {
  override name = "EdgelinError";
}

/** The device cannot load the graph, or computes otherwise; another one may. */
export class DeviceError extends EdgelinError {}

/** The message of a foreign exception on one line, shortened. */
export function oneLine(error: unknown): string {
  const text = String(error instanceof Error ? error.message : error).split(/\s+/).join(" ").trim();
  return text.length <= 300 ? text : `${text.slice(0, 297)}...`;
}

/** What the file system says, as people do. */
export function why(error: unknown): string {
  const { code = String(error) } = error as { code?: string };
  const known: Record<string, string> = {
    ENOENT: "there is no such file or folder", ENOTDIR: "a part of its path is no folder", EISDIR: "it is a folder",
    EACCES: "access is denied", ENOSPC: "no room is left",
  };
  return known[code] ?? code;
}

/** Refuse what is no object of options, or has one that does not exist. */
export function checkNames(given: unknown, what: string, names: readonly string[]): void {
  if (typeof given !== "object" || given === null) throw new EdgelinError(`the ${what}s are ${String(given)}; give an object`);
  const unknown = Object.keys(given).find((name) => !names.includes(name));
  if (unknown !== undefined) throw new EdgelinError(`there is no ${what} ${unknown}; there are: ${names.join(", ")}`);
}
