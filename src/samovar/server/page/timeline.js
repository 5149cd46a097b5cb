// Which steps were computed, and which skipped? A row of cells that fills as the steps come.

export class Timeline {
  constructor(parent, name, numSteps) {
    this.states = [];
    this.row = document.createElement("div");
    this.row.className = "timeline";
    const label = document.createElement("span");
    label.className = "name";
    label.textContent = name;
    this.cells = document.createElement("div");
    this.cells.className = "cells";
    this.cells.setAttribute("role", "img");
    this.sum = document.createElement("span");
    this.sum.className = "sum";
    this.row.append(label, this.cells, this.sum);
    parent.append(this.row);
    this.resize(numSteps);
  }

  resize(numSteps) {
    if (this.cells.children.length === numSteps) return;
    this.cells.classList.toggle("is-dense", numSteps > 90);
    this.cells.replaceChildren(...Array.from({ length: numSteps }, () => {
      const cell = document.createElement("i");
      cell.className = "cell";
      return cell;
    }));
  }

  // Without a cache every step is computed.
  add({ step, num_steps: numSteps, is_computed: isComputed, seconds }) {
    this.resize(numSteps);
    this.states[step - 1] = isComputed === false ? "skipped" : "computed";
    const cell = this.cells.children[step - 1];
    cell.className = `cell ${this.states[step - 1]}`;
    cell.title = `step ${step}: ${this.states[step - 1]}, ${(1000 * seconds).toFixed(0)} ms`;
    this.tell();
  }

  show(states) {
    this.resize(states.length);
    this.states = [...states];
    states.forEach((state, index) => { this.cells.children[index].className = `cell ${state}`; });
    this.tell();
  }

  tell() {
    const computed = this.states.filter((state) => state === "computed").length;
    const skipped = this.states.filter((state) => state === "skipped").length;
    this.sum.textContent = `${computed} of ${this.cells.children.length}`;
    this.cells.setAttribute("aria-label", `${computed} steps computed, ${skipped} skipped`);
  }
}
