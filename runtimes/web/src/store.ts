/** State files in the browser: kept in IndexedDB, or saved as a download. */

const TABLE = "files";

/** Named bytes in IndexedDB. */
export class Store {
  private constructor(private readonly database: IDBDatabase) {}

  static async open(name: string): Promise<Store> {
    const request = indexedDB.open(name, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE);
    return new Store(await done(request));
  }

  async put(key: string, bytes: Uint8Array): Promise<void> {
    const transaction = this.database.transaction(TABLE, "readwrite");
    transaction.objectStore(TABLE).put(bytes, key);
    await new Promise<void>((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }

  async get(key: string): Promise<Uint8Array | undefined> {
    return done(this.#table("readonly").get(key) as IDBRequest<Uint8Array | undefined>);
  }

  async keys(): Promise<string[]> {
    return done(this.#table("readonly").getAllKeys() as IDBRequest<string[]>);
  }

  async delete(key: string): Promise<void> {
    await done(this.#table("readwrite").delete(key));
  }

  #table(mode: IDBTransactionMode): IDBObjectStore {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

/** Have the browser save bytes as a file. */
export function download(bytes: Uint8Array, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes as BlobPart], { type: "application/octet-stream" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
