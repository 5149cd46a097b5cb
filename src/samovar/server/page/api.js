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

export async function readStatus() {
  const response = await check(await fetch("/v1/samovar/status", { headers: headers() }));
  return response.json();
}

// Calls onEvent for every event of a request, and ends when the stream does.
export async function generate(request, signal, onEvent) {
  const response = await check(await fetch("/v1/images/generations", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(request),
    signal,
  }));
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
