// What is known of what was made? Its figures, and which of its steps were computed.

import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);

export function jobRows(job) {
  const { seconds, num_frames: frames, fps, request } = job.samovar;
  const skipped = statesOf(job).filter((state) => state === "skipped").length;
  return [
    ["time", `${seconds.toFixed(2)} s`],
    ...(skipped ? [["skipped", `${skipped} of ${statesOf(job).length}`]] : []),
    ["size", job.size], ["frames", `${frames} at ${fps}/s`], ["seed", String(request.seed)],
  ];
}

// Which steps were computed: of several denoisers one after the other, of several branches the longest.
function statesOf({ samovar }) {
  const denoisers = samovar.cache.flatMap((stats) => (typeof stats === "object" ? Object.values(stats) : []));
  const longest = ({ branches }) => Object.values(branches).reduce((most, { mask }) => (mask.length > most.length ? mask : most), "");
  const mask = denoisers.map(longest).join("") || "#".repeat(samovar.num_inference_steps ?? 0);
  return [...mask].map((letter) => (letter === "#" ? "computed" : "skipped"));
}

export function showStates(jobs, isCached) {
  $("timelines").replaceChildren();
  $("legend").hidden = false;
  const names = isCached && jobs[0].samovar.request.cache !== false ? ["cached", "exact"] : ["steps"];
  jobs.forEach((job, index) => { new Timeline($("timelines"), names[index], 1).show(statesOf(job)); });
}

export function showFigures({ cached, exact, psnr: decibels }) {
  const skipped = cached.states.filter((state) => state === "skipped").length;
  const rows = [["time", `${cached.seconds.toFixed(2)} s`]];
  if (exact) rows.push(["exact", `${exact.seconds.toFixed(2)} s`], ["faster", `${(exact.seconds / cached.seconds).toFixed(2)}×`]);
  if (skipped) rows.push(["skipped", `${skipped} of ${cached.states.length}`]);
  if (exact) rows.push(["likeness", decibels === Infinity ? "same bits" : `${decibels.toFixed(1)} dB`]);
  if (cached.memory) rows.push(["memory", bytes(cached.memory)]);
  rows.push(["seed", String(cached.seed)]);
  showRows(rows);
  $("notes").textContent = cached.notes.join(" · ");
}

export function showRows(rows) {
  $("figures").replaceChildren(...rows.map(([name, value]) => {
    const box = document.createElement("div");
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    box.append(term, text);
    return box;
  }));
}

const bytes = (count) => (count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(2)} GiB` : `${(count / 2 ** 20).toFixed(0)} MiB`);
