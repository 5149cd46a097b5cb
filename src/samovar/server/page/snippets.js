// How would a program ask for this? As curl and in Python, ready to be copied.

const OPENAI = ["prompt", "model", "n", "size"];

// Within single quotes a shell reads all but the quote itself.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(request, origin, hasKey) {
  const lines = [`curl -s ${origin}/v1/images/generations`, "-H 'Content-Type: application/json'"];
  if (hasKey) lines.push('-H "Authorization: Bearer $SAMOVAR_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(request))}`);
  const save = `python3 -c 'import base64, json, sys; open("out.png", "wb").write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))'`;
  return `${lines.join(" \\\n  ")} \\\n  | ${save}`;
}

// JSON's text is Python's too, but for three words; a text that reads like one of them stays a text.
const literal = (value) => {
  if (typeof value === "boolean") return value ? "True" : "False";
  return value === null ? "None" : JSON.stringify(value);
};

export function python(request, origin, hasKey) {
  const own = Object.entries(request).filter(([name]) => !OPENAI.includes(name));
  const plain = Object.entries(request).filter(([name]) => OPENAI.includes(name));
  const call = plain.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (own.length) call.push(`    extra_body={${own.map(([name, value]) => `"${name}": ${literal(value)}`).join(", ")}},`);
  const key = hasKey ? 'os.environ["SAMOVAR_API_KEY"]' : '"none"';
  return [
    "import base64",
    ...(hasKey ? ["import os"] : []),
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=${key})`,
    "answer = client.images.generate(",
    ...call,
    ")",
    'with open("out.png", "wb") as file:',
    "    file.write(base64.b64decode(answer.data[0].b64_json))",
  ].join("\n");
}
