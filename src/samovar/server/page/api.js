// How does the page talk to the server? With fetch, and events read as they come.

const KEY = "samovar.key";

export const apiKey = () => sessionStorage.getItem(KEY) || "";
export const setApiKey = (key) => sessionStorage.setItem(KEY, key);

export class ServerError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.code = error.code;
    this.param = error.param;
  }
}

const headers = () => (apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {});

async function check(response) {
  if (response.ok) return response;
  const fallback = { message: `The server answered ${response.status}.`, code: null, param: null };
  const body = await response.json().catch(() => ({ error: fallback }));
  throw new ServerError(response.status, body.error || fallback);
}

const get = async (path, signal) => check(await fetch(path, { headers: headers(), signal }));

// As JSON, or as a form if there are files: [name, file].
async function post(path, request, files, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(request)) form.append(name, typeof value === "object" ? JSON.stringify(value) : value);
  for (const [name, file] of files) form.append(name, file);
  const json = { headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(request) };
  return check(await fetch(path, { method: "POST", signal, ...(files.length ? { headers: headers(), body: form } : json) }));
}

export const readStatus = async () => (await get("/v1/samovar/status")).json();
export const createVideo = async (request, files, signal) => (await post("/v1/videos", request, files, signal)).json();
export const readVideo = async (id, signal) => (await get(`/v1/videos/${id}`, signal)).json();
export const listVideos = async () => (await (await get("/v1/videos?limit=60")).json()).data;
export const readContent = async (id, variant, signal) => (await get(`/v1/videos/${id}/content?variant=${variant}`, signal)).blob();
export const deleteVideo = async (id) => check(await fetch(`/v1/videos/${id}`, { method: "DELETE", headers: headers() }));
export const createSound = async (request, signal) => (await post("/v1/audio/generate", request, [], signal)).blob();

// Calls onEvent for every event of a request, and ends when the stream does.
export async function generate(request, files, signal, onEvent) {
  const response = await post(files.length ? "/v1/images/edits" : "/v1/images/generations", request, files, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((text) => text.startsWith("data: "));
      if (!line) continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new ServerError(200, data.error);
      onEvent(data);
    }
  }
}
