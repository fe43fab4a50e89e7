// Talks to the server that the page came from.

const KEY = "tandem-api-key"; // of this tab, gone when it is closed

/** The server wants a key that it was not given. */
export class KeyNeeded extends Error {}

export function rememberKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  // Without one the browser may know it: the page itself was asked for it then.
  if (key) headers.authorization = `Bearer ${utf8AsLatin1(key)}`;
  // The address of the page may hold a password, which no request may.
  const answer = await fetch(new URL(path, location.origin), { ...options, headers });
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  const message = found?.error?.message ?? `The server returned HTTP ${answer.status}.`;
  throw answer.status === 401 ? new KeyNeeded(message) : new Error(message);
}

/** A header holds bytes; the server reads them as UTF-8. */
function utf8AsLatin1(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** The card of the model that is served. */
export async function model() {
  const found = await (await ask("/v1/models")).json();
  return found.data[0];
}

/** What works with what, and within which bounds. */
export async function capabilities() {
  return (await ask("/capabilities")).json();
}

const asJson = (fields, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(fields),
  signal,
});

/** The tokens of a chat, with those that stand for its images. */
export async function tokens(messages, signal) {
  const found = await (await ask("/tokenize", asJson({ messages }, signal))).json();
  return found.tokens;
}

/** The events of an answer to messages or to a prompt, each with the step that made it. */
export async function* answer(fields, signal) {
  const path = fields.messages ? "/v1/chat/completions" : "/v1/completions";
  const response = await ask(path, asJson({ ...fields, stream: true, trace: true }, signal));
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
