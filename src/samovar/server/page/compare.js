// How near are two images or videos? Side by side under a slider, and as a number.

import { InStep } from "./in_step.js";

const PARTS = ["first", "second", "split", "tag-left", "tag-right", "film", "film-exact", "sound"];
const MOST_FRAMES = 32; // Of a video, of which the number is made.

export class Compare {
  constructor() {
    for (const id of ["canvas", ...PARTS]) this[id] = document.getElementById(id);
    this.exact = this["film-exact"];
    this.both = new InStep(this.film, this.exact);
    this.split.addEventListener("input", () => this.place());
  }

  clear() {
    this.canvas.classList.add("is-empty");
    for (const id of PARTS) this[id].hidden = true;
    this.both.close();
    for (const player of [this.film, this.exact, this.sound]) {
      player.pause();
      URL.revokeObjectURL(player.src);
      player.removeAttribute("src");
    }
  }

  // A video or a sound, from its file.
  play(blob, alt) {
    this.clear();
    const player = blob.type.startsWith("video/") ? this.film : this.sound;
    Object.assign(this.film, { controls: true, loop: true });
    this.load(player, blob, alt);
    if (player === this.film) player.play().catch(() => {}); // A browser may want a click first.
  }

  // The cached video below, the exact one above it as far as the slider is. Both are moved by one scrubber.
  playBoth(cached, exact, alt, { num_frames: numFrames, fps }) {
    this.clear();
    Object.assign(this.film, { controls: false, loop: false });
    this.load(this.film, cached, `${alt} (cached)`);
    this.load(this.exact, exact, `${alt} (exact)`);
    this.showSplit();
    return this.both.open(numFrames, fps);
  }

  load(player, blob, alt) {
    this.canvas.classList.remove("is-empty");
    player.src = URL.createObjectURL(blob);
    player.setAttribute("aria-label", alt);
    player.hidden = false;
    this.film.onloadedmetadata = () => this.canvas.style.setProperty("aspect-ratio", `${this.film.videoWidth} / ${this.film.videoHeight}`);
  }

  working(is) { this.canvas.classList.toggle("is-working", is); }

  // One image: a preview on its way, or the only one.
  showOne(source, alt) {
    this.canvas.classList.remove("is-empty");
    this.put(this.first, source, alt);
    for (const id of ["second", "split", "tag-left", "tag-right"]) this[id].hidden = true;
  }

  // The cached one below, the exact one above it as far as the slider is.
  showBoth(cached, exact, alt) {
    this.showOne(cached, `${alt} (cached)`);
    this.put(this.second, exact, `${alt} (exact)`);
    this.showSplit();
  }

  showSplit() {
    for (const id of ["split", "tag-left", "tag-right"]) this[id].hidden = false;
    this.place();
  }

  put(image, source, alt) {
    image.src = source;
    image.alt = alt;
    image.hidden = false;
    image.onload = () => this.canvas.style.setProperty("aspect-ratio", `${image.naturalWidth} / ${image.naturalHeight}`);
  }

  place() { this.canvas.style.setProperty("--split", `${this.split.value}%`); }
}

// The peak signal-to-noise ratio in dB: Infinity for the same bits.
export async function psnr(one, other) {
  const [a, b] = await Promise.all([one, other].map(async (source) => {
    const image = Object.assign(new Image(), { src: source });
    await image.decode();
    return pixels(image, image.naturalWidth, image.naturalHeight);
  }));
  return decibels(difference(a, b));
}

// The same of two videos, over frames from the first to the last. Their files have lost something too.
export async function filmPsnr(one, other, { num_frames: numFrames, fps }) {
  const films = await Promise.all([one, other].map(opened));
  const count = Math.min(numFrames, MOST_FRAMES);
  let sum = 0;
  for (let k = 0; k < count; k += 1) {
    const index = Math.round((k * (numFrames - 1)) / Math.max(1, count - 1));
    const [a, b] = await Promise.all(films.map(async (film) => {
      const seeked = new Promise((resolve) => { film.onseeked = resolve; });
      film.currentTime = (index + 0.5) / fps;
      await seeked;
      return pixels(film, film.videoWidth, film.videoHeight);
    }));
    sum += difference(a, b);
  }
  for (const film of films) URL.revokeObjectURL(film.src);
  return decibels(sum / count);
}

function opened(blob) {
  const film = Object.assign(document.createElement("video"), { muted: true, preload: "auto", src: URL.createObjectURL(blob) });
  return new Promise((resolve, reject) => {
    film.onloadeddata = () => resolve(film);
    film.onerror = () => reject(new Error("The video cannot be played here."));
  });
}

function pixels(source, width, height) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(source, 0, 0);
  return context.getImageData(0, 0, width, height).data;
}

function difference(a, b) {
  if (a.length !== b.length) return NaN;
  let sum = 0;
  for (let i = 0; i < a.length; i += 4) {
    for (let c = 0; c < 3; c += 1) sum += (a[i + c] - b[i + c]) ** 2;
  }
  return sum / (0.75 * a.length);
}

const decibels = (error) => 10 * Math.log10(255 ** 2 / error);
