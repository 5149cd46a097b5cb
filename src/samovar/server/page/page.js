// What happens when something is pressed? The form, the stage and the request, put together.

import { ServerError, apiKey, generate, readStatus, setApiKey } from "./api.js";
import { Compare, psnr } from "./compare.js";
import { History } from "./history.js";
import { curl, python } from "./snippets.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const compare = new Compare();
const history = new History(recall);
let server = null;
let running = null;
let language = "curl";

// ---------------------------------------------------------------------------------------------- the server

async function refresh() {
  try {
    server = await readStatus();
    showServer();
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) return askKey();
    setState("problem", error instanceof ServerError ? error.message : "no connection");
  }
  return undefined;
}

function showServer() {
  const { model, defaults, limits } = server;
  $("model").textContent = model;
  $("cache").hidden = !server.is_cached;
  $("cache").textContent = "cache on";
  if (server.problem) setState("problem", server.problem);
  else setState("ready", server.queued ? `${server.queued} waiting` : server.running ? "at work" : "ready");
  $("steps").placeholder = defaults.num_inference_steps || "";
  $("width").placeholder = defaults.width || "";
  $("height").placeholder = defaults.height || "";
  $("true-cfg").placeholder = defaults.true_cfg_scale ?? "";
  $("guidance").placeholder = defaults.guidance_scale ?? "";
  $("steps").max = limits.max_steps;
  $("prompt").maxLength = limits.max_prompt_characters;
  $("adapters").hidden = !server.adapters.length;
  if ($("lora").options.length !== server.adapters.length + 1) {
    $("lora").replaceChildren(new Option("none", ""), ...server.adapters.map((name) => new Option(name, name)));
  }
  const canCompare = server.is_cached;
  $("compare").disabled = !canCompare;
  if (!canCompare) $("compare").checked = false;
  $("compare-hint").hidden = canCompare;
  $("compare-hint").textContent = "This server runs without a cache, so every image is exact.";
  drawSnippet();
}

function setState(state, text) {
  $("state").dataset.state = state;
  if ($("state").textContent !== text) $("state").textContent = text;
}

function askKey() {
  setState("problem", "needs a key");
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-dialog").addEventListener("close", () => {
  // A key travels in a header, which holds printable ASCII only; fetch would throw at anything else.
  const key = $("key").value.trim();
  $("key").value = "";
  if (key && !/^[\x20-\x7e]+$/.test(key)) showError(new ServerError(401, { message: "The key has characters that no key has." }));
  else {
    if (key) setApiKey(key);
    refresh();
  }
});

// ---------------------------------------------------------------------------------------------- the request

function readRequest() {
  const request = { prompt: $("prompt").value.trim() };
  const [width, height] = ["width", "height"].map((id) => $(id).value || $(id).placeholder);
  if (($("width").value || $("height").value) && width && height) request.size = `${width}x${height}`;
  for (const id of ["steps", "seed", "true-cfg", "guidance"]) {
    if ($(id).value !== "") request[$(id).name] = Number($(id).value);
  }
  if ($("lora").value) {
    request.lora = { name: $("lora").value };
    if ($("lora-scale").value !== "") request.lora.scale = Number($("lora-scale").value);
  }
  if ($("negative").value.trim()) request.negative_prompt = $("negative").value.trim();
  return request;
}

function fillForm(request) {
  const [width, height] = (request.size || "x").split("x");
  $("prompt").value = request.prompt;
  $("width").value = width;
  $("height").value = height;
  $("lora").value = request.lora?.name ?? "";
  $("lora-scale").value = request.lora?.scale ?? "";
  for (const id of ["steps", "seed", "true-cfg", "guidance", "negative"]) $(id).value = request[$(id).name] ?? "";
}

function drawSnippet() {
  const request = readRequest();
  if (!request.prompt) request.prompt = $("prompt").placeholder;
  const write = language === "curl" ? curl : python;
  $("snippet").textContent = write(request, location.origin, Boolean(apiKey()));
}

function chooseLanguage(name) {
  language = name;
  for (const tab of ["curl", "python"]) {
    $(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    $(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
  }
  $("snippet").setAttribute("aria-labelledby", `tab-${name}`);
  drawSnippet();
}

for (const name of ["curl", "python"]) {
  $(`tab-${name}`).addEventListener("click", () => chooseLanguage(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    chooseLanguage(name === "curl" ? "python" : "curl");
    $(`tab-${language}`).focus();
  });
}

$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("snippet").textContent);
    $("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("snippet")); // Without a secure origin there is no clipboard.
    $("copy").textContent = "Selected";
  }
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
});

// ---------------------------------------------------------------------------------------------- a run

// One image; its events move the stage. Resolves to what is kept of it.
async function run(request, name, signal) {
  const steps = request.num_inference_steps || server?.defaults.num_inference_steps || 1;
  const timeline = new Timeline($("timelines"), name, steps);
  const made = { states: timeline.states, image: null, seconds: null, memory: null, seed: null, notes: [] };
  const asked = { ...request, stream: true, partial_images: 3, progress: true };
  await generate(asked, signal, (event) => {
    if (event.type === "samovar.progress") {
      timeline.add(event);
      $("go").textContent = `${name} ${event.step} / ${event.num_steps}`;
    } else if (event.type.endsWith(".partial_image")) {
      compare.showOne(`data:image/png;base64,${event.b64_json}`, `${request.prompt} (on its way)`);
    } else if (event.type.endsWith(".completed")) {
      made.image = `data:image/png;base64,${event.b64_json}`;
      made.seconds = event.samovar.seconds;
      made.memory = event.samovar.memory_bytes;
      made.notes = event.samovar.notes;
      made.seed = event.seed;
      compare.showOne(made.image, request.prompt);
    }
  });
  if (!made.image) throw new Error("The stream ended before the image came.");
  return made;
}

async function start() {
  if (running || !$("form").reportValidity()) return;
  running = new AbortController();
  const request = readRequest();
  const isCompared = $("compare").checked;
  prepare();
  try {
    const cached = await run(request, server?.is_cached ? "cached" : "steps", running.signal);
    const entry = { id: Date.now(), request: { ...request, seed: cached.seed }, cached, exact: null, psnr: null };
    showFigures(entry);
    $("spoken").textContent = `Done in ${entry.cached.seconds.toFixed(1)} seconds.`;
    if (isCompared) await addExact(entry);
    await history.add(entry);
  } catch (error) {
    showError(error);
  } finally {
    running = null;
    compare.working(false);
    $("go").disabled = false;
    $("go").textContent = "Generate";
    $("stop").hidden = true;
    refresh();
  }
}

// The other half of a comparison. If it fails or is cancelled, the image that is there stays.
async function addExact(entry) {
  const { cached, request } = entry;
  try {
    const exact = await run({ ...request, cache: false }, "exact", running.signal);
    entry.psnr = await psnr(cached.image, exact.image);
    entry.exact = exact;
    compare.showBoth(cached.image, exact.image, request.prompt);
    showFigures(entry);
  } catch (error) {
    compare.showOne(cached.image, request.prompt);
    showError(error);
  }
}

function prepare() {
  $("problem").hidden = true;
  $("timelines").replaceChildren();
  $("figures").replaceChildren();
  $("notes").textContent = "";
  $("legend").hidden = false;
  $("go").disabled = true;
  $("go").textContent = "Waiting";
  $("stop").hidden = false;
  compare.clear();
  compare.working(true);
}

function showError(error) {
  if (error.name === "AbortError") {
    $("spoken").textContent = "Cancelled.";
    return;
  }
  if (error instanceof ServerError && error.status === 401) askKey();
  $("problem").textContent = error instanceof ServerError ? error.message : `The connection failed: ${error.message}`;
  $("problem").hidden = false;
}

function recall(entry) {
  if (running) return;
  fillForm(entry.request);
  $("timelines").replaceChildren();
  $("legend").hidden = false;
  $("problem").hidden = true;
  new Timeline($("timelines"), entry.exact || entry.cached.states.includes("skipped") ? "cached" : "steps", 1).show(entry.cached.states);
  if (entry.exact) {
    new Timeline($("timelines"), "exact", 1).show(entry.exact.states);
    compare.showBoth(entry.cached.image, entry.exact.image, entry.request.prompt);
  } else compare.showOne(entry.cached.image, entry.request.prompt);
  showFigures(entry);
  drawSnippet();
}

function showFigures({ cached, exact, psnr: decibels }) {
  const skipped = cached.states.filter((state) => state === "skipped").length;
  const rows = [["time", `${cached.seconds.toFixed(2)} s`]];
  if (exact) rows.push(["exact", `${exact.seconds.toFixed(2)} s`], ["faster", `${(exact.seconds / cached.seconds).toFixed(2)}×`]);
  if (skipped) rows.push(["skipped", `${skipped} of ${cached.states.length}`]);
  if (exact) rows.push(["likeness", decibels === Infinity ? "same bits" : `${decibels.toFixed(1)} dB`]);
  if (cached.memory) rows.push(["memory", bytes(cached.memory)]);
  rows.push(["seed", String(cached.seed)]);
  $("figures").replaceChildren(...rows.map(([name, value]) => {
    const box = document.createElement("div");
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    box.append(term, text);
    return box;
  }));
  $("notes").textContent = cached.notes.join(" · ");
}

const bytes = (count) => (count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(2)} GiB` : `${(count / 2 ** 20).toFixed(0)} MiB`);

// ---------------------------------------------------------------------------------------------- keys and start

$("form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
$("form").addEventListener("input", drawSnippet);
$("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
  if (event.key === "Escape" && running) running.abort();
});

history.load();
refresh();
setInterval(() => { if (!document.hidden && !$("key-dialog").open) refresh(); }, 3000);
