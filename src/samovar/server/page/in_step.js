// How do two videos play as one? One scrubber moves both by frames, and while they play the second follows the first.

const FAR_S = 0.5; // Behind by more than this, it jumps; by less, it hurries or dawdles.

export class InStep {
  constructor(first, second) {
    this.films = [first, second];
    for (const id of ["transport", "back", "play", "forward", "scrub", "frame"]) this[id] = document.getElementById(id);
    this.scrub.addEventListener("input", () => { this.stop(); this.show(Number(this.scrub.value)); });
    this.play.addEventListener("click", () => (this.isPlaying ? this.pause() : this.start()));
    this.back.addEventListener("click", () => { this.pause(); this.show(this.index - 1); });
    this.forward.addEventListener("click", () => { this.pause(); this.show(this.index + 1); });
  }

  async open(numFrames, fps) {
    Object.assign(this, { numFrames, fps });
    this.scrub.max = numFrames - 1;
    this.transport.hidden = false;
    this.show(0);
    await this.start();
  }

  close() {
    this.stop();
    this.transport.hidden = true;
  }

  // The middle of a frame: its edge may be rounded into the one before.
  show(index) {
    this.tell(Math.min(Math.max(index, 0), this.numFrames - 1));
    for (const film of this.films) film.currentTime = (this.index + 0.5) / this.fps;
  }

  tell(index) {
    this.index = index;
    this.scrub.value = index;
    this.frame.textContent = `${index + 1} of ${this.numFrames}`;
  }

  async start() {
    if (this.index === this.numFrames - 1) this.show(0);
    this.isPlaying = true;
    this.play.textContent = "Pause";
    try {
      await Promise.all(this.films.map((film) => film.play()));
      this.follow();
    } catch (error) {
      if (error.name !== "AbortError") this.stop(); // A browser may want a click first.
    }
  }

  stop() {
    this.isPlaying = false;
    this.play.textContent = "Play";
    for (const film of this.films) {
      film.pause();
      film.playbackRate = 1;
    }
  }

  // Both on the frame that the first one shows.
  pause() {
    if (!this.isPlaying) return;
    this.stop();
    this.show(this.index);
  }

  follow() {
    cancelAnimationFrame(this.next); // There is one follower, however often it is started.
    if (!this.isPlaying) return;
    const [first, second] = this.films;
    if (first.ended) {
      this.show(0);
      this.start();
      return;
    }
    const behind = first.currentTime - second.currentTime;
    if (Math.abs(behind) > FAR_S && !second.seeking) second.currentTime = first.currentTime;
    second.playbackRate = Math.min(Math.max(1 + 4 * behind, 0.25), 4);
    if (second.paused && !second.ended) second.play().catch(() => {});
    this.tell(Math.min(Math.floor(first.currentTime * this.fps), this.numFrames - 1));
    this.next = requestAnimationFrame(() => this.follow());
  }
}
