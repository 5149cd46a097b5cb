// What was made before? Images and sounds are kept in this browser (IndexedDB); videos are jobs of the server.

import { listVideos, readContent } from "./api.js";

const MOST = 60;

const opened = new Promise((resolve) => {
  const asking = indexedDB.open("samovar", 1);
  asking.onupgradeneeded = () => asking.result.createObjectStore("made", { keyPath: "id" });
  asking.onsuccess = () => resolve(asking.result);
  asking.onerror = () => resolve(null); // A private window: the history lasts as long as the page.
});

async function act(mode, work) {
  const database = await opened;
  if (!database) return undefined;
  return new Promise((resolve) => {
    const store = database.transaction("made", mode).objectStore("made");
    const asking = work(store);
    asking.onsuccess = () => resolve(asking.result);
    asking.onerror = () => resolve(undefined);
  });
}

export class History {
  constructor(onChoose) {
    this.entries = [];
    this.onChoose = onChoose;
    this.list = document.getElementById("history");
    this.empty = document.getElementById("history-empty");
    this.forget = document.getElementById("forget");
    this.forget.addEventListener("click", () => this.clear());
  }

  // The server's videos, with those of other clients. Each thumbnail is fetched once.
  async loadJobs() {
    const known = new Map(this.entries.map((entry) => [entry.id, entry]));
    this.forget.hidden = true;
    this.entries = await Promise.all((await listVideos()).map(async (job) => {
      const before = known.get(job.id);
      const image = before?.cached.image ?? (job.status === "completed" ? URL.createObjectURL(await readContent(job.id, "thumbnail")) : null);
      return { id: job.id, job, request: { prompt: job.prompt, ...job.samovar.request }, cached: { image, word: job.status.replace("_", " ") } };
    }));
    this.draw(this.current);
    this.forget.hidden = true;
  }

  async load() {
    this.entries = ((await act("readonly", (store) => store.getAll())) || []).sort((a, b) => b.id - a.id);
    this.draw();
  }

  async add(entry) {
    this.entries.unshift(entry);
    for (const old of this.entries.splice(MOST)) await act("readwrite", (store) => store.delete(old.id));
    await act("readwrite", (store) => store.put(entry));
    this.draw(entry.id);
  }

  async clear() {
    this.entries = [];
    await act("readwrite", (store) => store.clear());
    this.draw();
  }

  draw(current) {
    this.current = current;
    this.empty.hidden = this.entries.length > 0;
    this.forget.hidden = this.entries.length === 0;
    this.list.replaceChildren(...this.entries.map((entry) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      const image = document.createElement(entry.cached.image ? "img" : "span");
      if (entry.cached.image) Object.assign(image, { src: entry.cached.image, alt: entry.request.prompt, loading: "lazy" });
      else Object.assign(image, { className: "word", textContent: entry.cached.word });
      button.type = "button";
      button.title = entry.request.prompt;
      button.setAttribute("aria-current", String(entry.id === current));
      button.append(image);
      button.addEventListener("click", () => { this.draw(entry.id); this.onChoose(entry); });
      item.append(button);
      return item;
    }));
  }
}
