// Client of the server that serves the page.

const KEY = "tandem-api-key"; // in session storage: deleted when the tab is closed

/** Error: the server requires an API key. */
export class KeyNeeded extends Error {}

export function rememberKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  // Without a stored key the browser may send one itself, from its password prompt.
  if (key) headers.authorization = `Bearer ${utf8AsLatin1(key)}`;
  // The address of the page may contain a password, which `fetch` rejects.
  const answer = await fetch(new URL(path, location.origin), { ...options, headers });
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  const message = found?.error?.message ?? `The server returned HTTP ${answer.status}.`;
  throw answer.status === 401 ? new KeyNeeded(message) : new Error(message);
}

/** Encodes a key for a header: header values are bytes, which the server reads as UTF-8. */
function utf8AsLatin1(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** Returns the card of the served model. */
export async function model() {
  const found = await (await request("/v1/models")).json();
  return found.data[0];
}

/** Returns the server's capabilities and limits. */
export async function capabilities() {
  return (await request("/capabilities")).json();
}

const asJson = (fields, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(fields),
  signal,
});

/** Returns the tokens of a chat, including image tokens. */
export async function tokens(messages, signal) {
  const found = await (await request("/tokenize", asJson({ messages }, signal))).json();
  return found.tokens;
}

/** Yields the stream events of a completion, each with its step trace. */
export async function* answer(fields, signal) {
  const path = fields.messages ? "/v1/chat/completions" : "/v1/completions";
  const response = await request(path, asJson({ ...fields, stream: true, trace: true }, signal));
  for await (const line of lines(response.body)) {
    const data = line.startsWith("data: ") ? line.slice(6) : "";
    if (data === "[DONE]") return;
    if (!data) continue;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
  throw new Error("The connection closed before the response was complete.");
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n");
    held = parts.pop();
    yield* parts;
  }
}
