// Which part of an image is redrawn? What is painted over: white in the mask, the rest is black.

const WIDTH = 1 / 12; // Of the brush, as a part of the shorter side.

export class MaskPainter {
  constructor(canvas) {
    this.canvas = canvas;
    this.mask = document.createElement("canvas");
    this.last = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.stroke(event);
    });
    canvas.addEventListener("pointermove", (event) => { if (this.last) this.stroke(event); });
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => { this.last = null; });
  }

  // Begin anew on an image, or on none.
  async open(file) {
    this.image = file ? await createImageBitmap(file) : null;
    this.canvas.hidden = !this.image;
    this.clear();
  }

  clear() {
    this.isPainted = false;
    if (!this.image) return;
    for (const canvas of [this.canvas, this.mask]) Object.assign(canvas, { width: this.image.width, height: this.image.height });
    this.canvas.getContext("2d").drawImage(this.image, 0, 0);
    this.mask.getContext("2d").fillRect(0, 0, this.mask.width, this.mask.height);
  }

  stroke(event) {
    const { width, height } = this.mask;
    const box = this.canvas.getBoundingClientRect();
    const point = [(event.clientX - box.left) * width / box.width, (event.clientY - box.top) * height / box.height];
    const context = this.mask.getContext("2d");
    Object.assign(context, { strokeStyle: "white", lineCap: "round", lineWidth: Math.max(1, Math.min(width, height) * WIDTH) });
    context.beginPath();
    context.moveTo(...(this.last ?? point));
    context.lineTo(...point);
    context.stroke();
    this.last = point;
    this.isPainted = true;
    const shown = this.canvas.getContext("2d");
    shown.drawImage(this.image, 0, 0);
    Object.assign(shown, { globalAlpha: 0.6, globalCompositeOperation: "screen" });
    shown.drawImage(this.mask, 0, 0);
    Object.assign(shown, { globalAlpha: 1, globalCompositeOperation: "source-over" });
  }

  file() {
    return new Promise((resolve) => { this.mask.toBlob((blob) => resolve(new File([blob], "mask.png", { type: "image/png" }))); });
  }
}
