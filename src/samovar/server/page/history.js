// What was made before? Images and sounds are kept in this browser (IndexedDB); videos are jobs of the server.

import { listVideos, readContent } from "./api.js";

const MOST = 60;
const PAIRS = "samovar.pairs"; // Of videos: the cached one's id, and that of the exact one made beside it.

const pairs = () => JSON.parse(localStorage.getItem(PAIRS) || "{}");

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

// A video's file may have been removed from the server's folder; the others are shown all the same.
const picture = async (job) => (job.status !== "completed" ? null
  : readContent(job.id, "thumbnail").then((blob) => URL.createObjectURL(blob), () => null));

// As the form has it: a number of frames as seconds.
const requestOf = ({ prompt, seconds, samovar: { request } }) => (
  { prompt, ...request, ...(request.num_frames ? { seconds: Number(seconds) } : {}) });

export class History {
  constructor(onChoose) {
    this.entries = [];
    this.onChoose = onChoose;
    this.list = document.getElementById("history");
    this.empty = document.getElementById("history-empty");
    this.forget = document.getElementById("forget");
    this.forget.addEventListener("click", () => this.clear());
  }

  // The server's videos, with those of other clients: a pair is one entry. Each thumbnail is fetched once.
  async loadJobs() {
    const known = new Map(this.entries.map((entry) => [entry.id, entry]));
    const jobs = await listVideos();
    const exacts = new Map(Object.entries(pairs()).map(([id, exact]) => [id, jobs.find((job) => job.id === exact)]));
    const hidden = new Set(jobs.map((job) => exacts.get(job.id)?.id));
    this.isWaiting = jobs.some((job) => job.status === "queued" || job.status === "in_progress");
    this.entries = await Promise.all(jobs.filter((job) => !hidden.has(job.id)).map(async (job) => {
      const image = known.get(job.id)?.cached.image ?? (await picture(job));
      const cached = { image, word: job.status === "in_progress" ? `${job.progress} %` : job.status };
      return { id: job.id, job, exact: exacts.get(job.id) ?? null, request: requestOf(job), cached };
    }));
    const drawn = JSON.stringify([this.current, this.entries.map((entry) => [entry.id, entry.exact?.id, entry.cached])]);
    if (drawn !== this.drawn) this.draw(this.current); // Whoever is on a button stays there.
    this.drawn = drawn;
    this.forget.hidden = true;
  }

  pair(cached, exact) {
    const there = new Set(this.entries.map((entry) => entry.id));
    const kept = Object.entries(pairs()).filter(([id]) => there.has(id));
    localStorage.setItem(PAIRS, JSON.stringify({ ...Object.fromEntries(kept), [cached]: exact }));
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
