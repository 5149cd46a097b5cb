// How would a program ask for this? As curl and in Python, ready to be copied.

const OPENAI = ["prompt", "model", "n", "size", "input"];
const CALLS = {
  image: ["import base64", "answer = client.images.generate(", 'with open("out.png", "wb") as file:\n    file.write(base64.b64decode(answer.data[0].b64_json))'],
  edit: ["import base64", "answer = client.images.edit(", 'with open("out.png", "wb") as file:\n    file.write(base64.b64decode(answer.data[0].b64_json))'],
  video: ["", "video = client.videos.create_and_poll(", 'client.videos.download_content(video.id).write_to_file("out.mp4")'],
  audio: ["", 'answer = client.audio.speech.create(\n    model="", voice="auto", response_format="wav",', 'answer.write_to_file("out.wav")'],
};

// Within single quotes a shell reads all but the quote itself.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const PATHS = { image: "/v1/images/generations", edit: "/v1/images/edits", video: "/v1/videos/sync", audio: "/v1/audio/generate" };

// A sound has other words for the same.
const worded = ({ prompt, seconds, ...rest }, kind) => {
  if (kind !== "audio") return { prompt, ...(seconds === undefined ? {} : { seconds }), ...rest };
  return { input: prompt, ...(seconds === undefined ? {} : { audio_length: seconds }), ...rest };
};

const written = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

// Files are given as [name of the field, name of the file].
export function curl(request, origin, hasKey, kind, files) {
  const path = PATHS[files.length && kind === "image" ? "edit" : kind];
  const lines = [`curl -s ${origin}${path}`];
  if (hasKey) lines.push('-H "Authorization: Bearer $SAMOVAR_API_KEY"');
  if (files.length) {
    lines.push(...files.map(([name, file]) => `-F ${quoted(`${name}=@"${file}"`)}`));
    lines.push(...Object.entries(request).map(([name, value]) => `--form-string ${quoted(`${name}=${written(value)}`)}`));
  } else lines.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(worded(request, kind)))}`);
  if (kind !== "image") return [...lines, kind === "video" ? "-o out.mp4" : "-o out.wav"].join(" \\\n  ");
  const save = `python3 -c 'import base64, json, sys; open("out.png", "wb").write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))'`;
  return `${lines.join(" \\\n  ")} \\\n  | ${save}`;
}

// JSON's text is Python's too, but for three words; a text that reads like one of them stays a text.
const literal = (value) => {
  if (typeof value === "boolean") return value ? "True" : "False";
  return value === null ? "None" : JSON.stringify(value);
};

export function python(asked, origin, hasKey, kind, files) {
  const request = worded(asked, kind);
  const [start, begin, save] = CALLS[files.length && kind === "image" ? "edit" : kind];
  const own = Object.entries(request).filter(([name]) => !OPENAI.includes(name));
  const plain = Object.entries(request).filter(([name]) => OPENAI.includes(name));
  const call = plain.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (own.length) call.push(`    extra_body={${own.map(([name, value]) => `"${name}": ${literal(value)}`).join(", ")}},`);
  const images = files.filter(([name]) => name !== "mask").map(([, file]) => `open(${JSON.stringify(file)}, "rb")`);
  if (images.length) call.unshift(`    ${kind === "video" ? "input_reference" : "image"}=${images.length > 1 ? `[${images.join(", ")}]` : images[0]},`);
  call.unshift(...files.filter(([name]) => name === "mask").map(([, file]) => `    mask=open(${JSON.stringify(file)}, "rb"),`));
  const key = hasKey ? 'os.environ["SAMOVAR_API_KEY"]' : '"none"';
  return [
    ...(start ? [start] : []),
    ...(hasKey ? ["import os"] : []),
    ...(start || hasKey ? [""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=${key})`,
    begin,
    ...call,
    ")",
    save,
  ].join("\n");
}
