// What happens when something is pressed? The form, the stage and the request, put together.

import { ServerError, apiKey, deleteVideo, generate, readContent, readStatus, setApiKey } from "./api.js";
import { Compare, filmPsnr, psnr } from "./compare.js";
import { jobRows, showFigures, showRows, showStates } from "./figures.js";
import { History } from "./history.js";
import { makeSound, makeVideo, watchVideo } from "./making.js";
import { MaskPainter } from "./mask.js";
import { curl, python } from "./snippets.js";
import { Timeline } from "./timeline.js";

const EXAMPLES = { image: "a grinning cat, 3d style", video: "rocket flying up", audio: "rain on a tin roof" };
const $ = (id) => document.getElementById(id);
const compare = new Compare();
const history = new History(recall);
const painter = new MaskPainter($("paint"));
let server = null;
let running = null;
let language = "curl";
let isShown = false;
let shownJobs = [];

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
  $("seconds").placeholder = server.seconds ? Number(server.seconds.toFixed(2)) : "";
  $("true-cfg").placeholder = defaults.true_cfg_scale ?? "";
  $("guidance").placeholder = defaults.guidance_scale ?? "";
  $("steps").max = limits.max_steps;
  $("prompt").maxLength = limits.max_prompt_characters;
  $("adapters").hidden = !server.adapters.length;
  if ($("lora").options.length !== server.adapters.length + 1) {
    $("lora").replaceChildren(new Option("none", ""), ...server.adapters.map((name) => new Option(name, name)));
  }
  const isVideo = server.output === "video";
  if (!isShown && server.output) {
    isShown = true;
    $("prompt").placeholder = EXAMPLES[server.output];
    $("length").hidden = server.output === "image";
    for (const side of document.querySelectorAll(".side")) side.hidden = server.output === "audio";
    $("compare-row").hidden = server.output === "audio";
    $("compare-word").textContent = `Compare with the exact ${server.output}`;
    $("upload").hidden = !server.can_edit || server.output === "audio";
    $("mask-row").hidden = !server.inputs.includes("mask_image");
    if (isVideo) $("history-empty").textContent = "Videos that this server makes are here until they expire.";
    (isVideo ? history.loadJobs() : history.load()).catch(showError);
  } else if (isVideo && !running && (history.isWaiting || server.running || server.queued)) history.loadJobs().catch(showError);
  const canCompare = server.is_cached && server.output !== "audio";
  $("compare").disabled = !canCompare;
  if (!canCompare) $("compare").checked = false;
  $("compare-hint").hidden = canCompare || !server.output || server.output === "audio";
  $("compare-hint").textContent = `This server runs without a cache, so every ${server.output} is exact.`;
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
  for (const id of ["steps", "seed", "true-cfg", "guidance", "seconds"]) {
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
  const [width, height] = request.width ? [request.width, request.height ?? ""] : (request.size || "x").split("x");
  const lora = Array.isArray(request.lora) ? request.lora[0] : request.lora; // The form has one.
  $("prompt").value = request.prompt;
  $("width").value = width;
  $("height").value = height;
  $("lora").value = lora?.name ?? "";
  $("lora-scale").value = lora?.scale ?? "";
  for (const id of ["steps", "seed", "true-cfg", "guidance", "negative", "seconds"]) $(id).value = request[$(id).name] ?? "";
}

function drawSnippet() {
  const request = readRequest();
  if (!request.prompt) request.prompt = $("prompt").placeholder;
  const write = language === "curl" ? curl : python;
  $("snippet").textContent = write(request, location.origin, Boolean(apiKey()), server?.output ?? "image", given());
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

// One image; its events move the stage, which keeps what it shows until the first one. Resolves to what is kept.
async function run(request, sent, name, signal) {
  const steps = request.num_inference_steps || server?.defaults.num_inference_steps || 1;
  const made = { states: [], image: null, seconds: null, memory: null, seed: null, notes: [] };
  const asked = { ...request, stream: true, partial_images: 3, progress: true };
  let timeline = null;
  await generate(asked, sent, signal, (event) => {
    if (!timeline) {
      if (name !== "exact") clearStage();
      timeline = new Timeline($("timelines"), name, steps);
      made.states = timeline.states;
    }
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
    const sent = await files(); // Once: both halves of a comparison begin from the same.
    if (server?.output === "video") return await startVideo(request, sent, isCompared);
    if (server?.output === "audio") return await startSound(request);
    const cached = await run(request, sent, server?.is_cached ? "cached" : "steps", running.signal);
    const entry = { id: Date.now(), request: { ...request, seed: cached.seed }, cached, exact: null, psnr: null };
    showFigures(entry);
    $("spoken").textContent = `Done in ${entry.cached.seconds.toFixed(1)} seconds.`;
    if (isCompared) await addExact(entry, sent);
    await history.add(entry);
  } catch (error) {
    showError(error);
  } finally {
    settle();
  }
  return undefined;
}

async function startVideo(request, sent, isCompared) {
  await finish(makeVideo(request, sent, running.signal, watching(), previewOf(request)), async ({ job, file }) => {
    if (isCompared) await addExactVideo(job, file, { ...request, seed: job.samovar.request.seed }, sent);
  });
}

// A video that was asked for before: it is shown as it is made, and can be cancelled.
async function watch(entry) {
  running = new AbortController();
  prepare();
  try {
    await finish(watchVideo(entry.job, running.signal, watching(), previewOf(entry.request)));
  } catch (error) {
    showError(error);
  } finally {
    settle();
  }
}

async function finish(making, then = async () => {}) {
  try {
    const made = await making;
    showJob(made.job, made.file);
    $("spoken").textContent = `Done in ${made.job.samovar.seconds.toFixed(1)} seconds.`;
    await then(made);
  } finally {
    await history.loadJobs();
  }
}

// What a job's progress moves; only the first word of a video clears the stage.
function watching() {
  let isNew = true;
  return (job) => {
    if (isNew) clearStage();
    isNew = false;
    $("legend").hidden = true;
    $("go").textContent = job.status === "queued" ? "Waiting" : `${job.progress} %`;
    if (history.current !== job.id) history.draw(job.id);
  };
}

const previewOf = (request) => (image) => compare.showOne(URL.createObjectURL(image), `${request.prompt} (on its way)`);

// The exact video of the same seed. If it fails or is cancelled, the one that is there stays, and plays meanwhile.
async function addExactVideo(job, file, request, sent) {
  try {
    const onJob = (exact) => { $("go").textContent = exact.status === "queued" ? "exact waits" : `exact ${exact.progress} %`; };
    const exact = await makeVideo({ ...request, cache: false }, sent, running.signal, onJob, () => {});
    history.pair(job.id, exact.job.id);
    await showPair(job, file, exact.job, exact.file);
  } catch (error) {
    showError(error);
  }
}

function showJob(job, file) {
  shownJobs = [job];
  $("delete").hidden = false;
  $("delete").textContent = "Delete this video";
  compare.play(file, job.prompt);
  showStates([job], server?.is_cached);
  showRows(jobRows(job));
  $("notes").textContent = job.samovar.notes.join(" · ");
}

async function showPair(job, file, exact, exactFile) {
  shownJobs = [job, exact];
  $("delete").hidden = false;
  $("delete").textContent = "Delete both videos";
  showStates([job, exact], true);
  const [time, ...rest] = jobRows(job);
  const [seconds, exactly] = [job.samovar.seconds, exact.samovar.seconds];
  const rows = [time, ["exact", `${exactly.toFixed(2)} s`], ["faster", `${(exactly / seconds).toFixed(2)}×`], ...rest];
  showRows(rows);
  $("notes").textContent = job.samovar.notes.join(" · ");
  await compare.playBoth(file, exactFile, job.prompt, job.samovar);
  const likeness = await filmPsnr(file, exactFile, job.samovar);
  if (shownJobs[1] === exact) showRows([...rows, ["likeness", likeness === Infinity ? "no difference" : `${likeness.toFixed(1)} dB`]]);
}

async function startSound(request) {
  const began = performance.now();
  const file = await makeSound(request, running.signal);
  clearStage();
  const cached = { file, word: request.prompt, seconds: (performance.now() - began) / 1000, states: [], notes: [], seed: request.seed ?? "by chance" };
  const entry = { id: Date.now(), request, cached, exact: null, psnr: null };
  recall(entry, true);
  await history.add(entry);
}

// What a client sends beside its words: an image, or several, and a mask that was chosen or painted.
async function files() {
  const painted = painter.isPainted ? await painter.file() : null;
  return chosen((file) => file, painted);
}

const given = () => chosen((file) => file.name, painter.isPainted ? "mask.png" : null);

function chosen(of, painted) {
  if ($("upload").hidden) return [];
  const images = [...$("image").files];
  const name = images.length > 1 ? "image[]" : server.output === "video" ? "input_reference" : "image";
  const masks = $("mask").files.length || !painted ? [...$("mask").files].map(of) : [painted];
  return [...images.map((file) => [name, of(file)]), ...masks.map((mask) => ["mask", mask])];
}

async function showGiven() {
  const images = [...$("image").files];
  const isPaintable = !$("mask-row").hidden && images.length === 1 && !$("mask").files.length;
  for (const image of $("given").querySelectorAll("img")) URL.revokeObjectURL(image.src);
  $("given").replaceChildren(...[...(isPaintable ? [] : images), ...$("mask").files].map((file) => {
    const item = document.createElement("li");
    item.append(Object.assign(new Image(), { src: URL.createObjectURL(file), alt: file.name }));
    return item;
  }));
  $("unpaint").hidden = !isPaintable;
  drawSnippet();
  await painter.open(isPaintable ? images[0] : null).catch(() => { $("unpaint").hidden = true; }); // The server says why.
}

for (const id of ["image", "mask"]) $(id).addEventListener("change", showGiven);
$("unpaint").addEventListener("click", () => { painter.clear(); drawSnippet(); });
$("paint").addEventListener("pointerup", drawSnippet);
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("form").addEventListener(kind, (event) => {
    if ($("upload").hidden || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    $("upload").classList.toggle("is-over", kind === "dragover");
    if (kind === "drop") {
      $("image").files = event.dataTransfer.files;
      showGiven();
    }
  });
}

$("delete").addEventListener("click", async () => {
  try {
    for (const job of shownJobs) await deleteVideo(job.id);
    clearStage();
    await history.loadJobs();
  } catch (error) {
    showError(error);
  }
});

// The other half of a comparison. If it fails or is cancelled, the image that is there stays.
async function addExact(entry, sent) {
  const { cached, request } = entry;
  try {
    const exact = await run({ ...request, cache: false }, sent, "exact", running.signal);
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
  $("go").disabled = true;
  $("go").textContent = "Waiting";
  $("stop").hidden = false;
  compare.working(true);
}

function settle() {
  running = null;
  compare.working(false);
  $("go").disabled = false;
  $("go").textContent = "Generate";
  $("stop").hidden = true;
  refresh();
}

// Only when something new is on its way: a request that is refused leaves what is there.
function clearStage() {
  shownJobs = [];
  $("timelines").replaceChildren();
  $("figures").replaceChildren();
  $("notes").textContent = "";
  $("legend").hidden = false;
  $("delete").hidden = true;
  compare.clear();
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

async function recall(entry, isNew = false) {
  if (running && !isNew) return;
  fillForm(entry.request);
  if (entry.job?.status === "queued" || entry.job?.status === "in_progress") {
    drawSnippet();
    $("problem").hidden = true;
    await watch(entry);
    return;
  }
  if (entry.job || entry.cached.file) {
    clearStage();
    $("legend").hidden = true;
    $("problem").hidden = true;
    drawSnippet();
    try {
      if (entry.cached.file) {
        compare.play(entry.cached.file, entry.request.prompt);
        showFigures(entry);
      } else if (entry.job.error) showError(new ServerError(200, entry.job.error));
      else await recallVideos(entry);
    } catch (error) {
      showError(error);
    }
    return;
  }
  compare.clear();
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

async function recallVideos({ job, exact }) {
  const files = await Promise.all([job, ...(exact ? [exact] : [])].map(({ id }) => readContent(id, "video")));
  if (running || history.current !== job.id) return; // Something else was chosen meanwhile.
  if (exact) await showPair(job, files[0], exact, files[1]);
  else showJob(job, files[0]);
}

// ---------------------------------------------------------------------------------------------- keys and start

$("form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
$("form").addEventListener("input", drawSnippet);
$("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
  if (event.key === "Escape" && running) running.abort();
});

refresh();
setInterval(() => { if (!document.hidden && !$("key-dialog").open) refresh(); }, 3000);
