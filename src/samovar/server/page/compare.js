// How near are two images? Side by side under a slider, and as a number.

export class Compare {
  constructor() {
    for (const id of ["canvas", "first", "second", "split", "tag-left", "tag-right", "film", "sound"]) {
      this[id] = document.getElementById(id);
    }
    this.split.addEventListener("input", () => this.place());
  }

  clear() {
    this.canvas.classList.add("is-empty");
    for (const id of ["first", "second", "split", "tag-left", "tag-right", "film", "sound"]) this[id].hidden = true;
    for (const player of [this.film, this.sound]) {
      player.pause();
      URL.revokeObjectURL(player.src);
      player.removeAttribute("src");
    }
  }

  // A video or a sound, from its file.
  play(blob, alt) {
    this.clear();
    const player = blob.type.startsWith("video/") ? this.film : this.sound;
    this.canvas.classList.remove("is-empty");
    player.src = URL.createObjectURL(blob);
    player.setAttribute("aria-label", alt);
    player.hidden = false;
    this.film.onloadedmetadata = () => this.canvas.style.setProperty("aspect-ratio", `${this.film.videoWidth} / ${this.film.videoHeight}`);
    if (player === this.film) player.play().catch(() => {}); // A browser may want a click first.
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

async function pixels(source) {
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, canvas.width, canvas.height).data;
}

// The peak signal-to-noise ratio in dB: Infinity for the same bits.
export async function psnr(one, other) {
  const [a, b] = await Promise.all([pixels(one), pixels(other)]);
  if (a.length !== b.length) return NaN;
  let sum = 0;
  for (let i = 0; i < a.length; i += 4) {
    for (let c = 0; c < 3; c += 1) sum += (a[i + c] - b[i + c]) ** 2;
  }
  return 10 * Math.log10(255 ** 2 / (sum / (0.75 * a.length)));
}
