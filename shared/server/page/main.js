// Playground: a chat, and an inspector of the speculation step of each token.

import { KeyNeeded, answer, capabilities, model, rememberKey, tokens } from "./api.js";
import { drawStrip, showMeters, summary, title, describe } from "./meters.js";
import { Question, Tray, runsOf, takeFiles } from "./images.js";
import { AnswerView, element } from "./tokens.js";
import { drawTree } from "./tree.js";

const EXAMPLES = [
  "A cinema has 6 rows of 13 seats. How many seats are there?",
  "Raj makes 6 cards a day for 18 days. He gives 25 of them to a friend and finds 17 more. " +
    "How many cards does Raj have now?",
  "Extract the fields name, order, city as JSON. The order number is KT-4821. " +
    "The customer is Elena Moroz. It goes to Lisbon.",
];
const TEXT_ALONE = "Text completion does not support images; use a chat message.";
const THEME = "tandem-theme", GHOSTS = "tandem-ghosts";
const $ = (id) => document.getElementById(id);

let turns = []; // messages and views of answers
let running = null; // AbortController of the running request
let shown = { view: null, step: null, pinned: false };
let imageToken = null; // placeholder of images
const writeTo = (id) => (text) => ($(id).textContent = text);
const tray = new Tray($("images"), writeTo("status"), writeTo("alert"));

// The inspector

function select(step, view, pinned) {
  if (shown.pinned && !pinned && running) return;
  show(step, view, pinned || shown.pinned);
}

function show(step, view, pinned = false) {
  shown.view?.mark(null);
  shown = { view, step, pinned };
  $("step").hidden = !step;
  const steps = view?.steps ?? [];
  showMeters(summary(steps));
  drawStrip($("strip"), steps, step, (chosen) => show(chosen, view, true));
  if (!step) return;
  if (pinned || !running) view.mark(step);
  $("step").classList.toggle("pinned", pinned);
  $("step-title").textContent = title(step);
  $("step-summary").textContent = describe(step);
  drawTree($("tree"), step);
  $("tree-box").setAttribute("aria-label", `Draft tree. ${title(step)}`);
}

// The chat

function fields() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const drafts = document.querySelector("input[name=drafts]:checked").value;
  const limits = { all: undefined, off: { enabled: false } };
  const messages = turns.map((turn) => turn.message);
  const form = document.querySelector("input[name=form]:checked").value;
  return {
    ...(form === "chat" ? { messages } : { prompt: messages.at(-1).content }),
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    speculative: drafts === "limit" ? { max_draft_tokens: number("max-drafts") } : limits[drafts],
  };
}

async function send(text) {
  $("welcome").hidden = true;
  $("alert").textContent = "";
  const question = new Question(text, tray.take());
  const view = new AnswerView(select);
  turns.push(question);
  $("log").append(question.element, view.element);
  const body = fields();
  turns.push(view);
  show(null, view);
  setRunning(new AbortController());
  try {
    if (!body.messages && question.images.length) throw new Error(TEXT_ALONE);
    if (question.images.length) showPlaces(body.messages, running.signal);
    for await (const event of answer(body, running.signal)) take(event, view);
    $("status").textContent = `Answer: ${view.content}`;
  } catch (error) {
    fail(error, view, question);
  } finally {
    setRunning(null);
    note(view);
  }
}

/** Writes the prompt positions of the chat's images next to them; nothing if the request fails. */
async function showPlaces(messages, signal) {
  const runs = await tokens(messages, signal).then((found) => runsOf(found, imageToken), () => []);
  const questions = turns.filter((turn) => turn.images?.length);
  if (runs.length !== questions.reduce((sum, turn) => sum + turn.images.length, 0)) return;
  for (const turn of questions) turn.place(runs.splice(0, turn.images.length));
}

function take(event, view) {
  const atEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
  for (const choice of event.choices) {
    const step = view.take(choice);
    if (!step) continue;
    for (const { origin } of step.drafts) {
      document.querySelector(`.seen-${origin}`)?.removeAttribute("hidden");
    }
    if (!shown.pinned) show(step, view);
  }
  if (atEnd) $("log").scrollTop = $("log").scrollHeight;
}

function fail(error, view, question) {
  if (error.name === "AbortError") {
    $("status").textContent = "Stopped";
  } else {
    $("alert").textContent = error.message;
  }
  if (error instanceof KeyNeeded) $("key-form").hidden = false;
  if (view.steps.length) return;
  // There is no output: the question returns to the input field.
  turns = turns.filter((turn) => turn !== view && turn !== question);
  view.element.remove();
  question.element.remove();
  $("question").value = question.text;
  tray.putBack(question.images);
  $("welcome").hidden = turns.length > 0;
}

function note(view) {
  const tokens = view.steps.reduce((sum, step) => sum + step.tokens.length, 0);
  const steps = view.steps.filter((step) => step.source !== "prefill").length;
  if (tokens) view.note.textContent = `${tokens} tokens in ${steps} steps after the prompt`;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  $("log").setAttribute("aria-busy", String(Boolean(controller)));
}

function newChat() {
  running?.abort();
  turns.forEach((turn) => turn.element.remove());
  turns = [];
  tray.take();
  $("welcome").hidden = false;
  $("alert").textContent = "";
  show(null, null);
  $("question").focus();
}

// The page

async function introduce() {
  try {
    const card = await model();
    const ranks = card.tp_size > 1 ? ` · TP ${card.tp_size}` : "";
    $("model").textContent = `${card.id} · ${card.speculative_algorithm ?? "no drafter"}${ranks}`;
    $("max-tokens").max = card.max_model_len;
    const { limits, images } = await capabilities();
    imageToken = limits.image_token;
    Object.assign(tray, { bounds: images, mostBytes: limits.max_body_bytes });
    $("add-image").hidden = !images;
    $("key-form").hidden = true;
    $("alert").textContent = "";
  } catch (error) {
    $("alert").textContent = error.message;
    $("key-form").hidden = !(error instanceof KeyNeeded);
  }
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
}

function begin() {
  const prefers = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  setTheme(localStorage.getItem(THEME) ?? prefers);
  $("theme").addEventListener("click", () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem(THEME, other);
    setTheme(other);
  });
  $("ghosts").checked = localStorage.getItem(GHOSTS) === "yes";
  const showGhosts = () => {
    $("log").classList.toggle("with-ghosts", $("ghosts").checked);
    localStorage.setItem(GHOSTS, $("ghosts").checked ? "yes" : "no");
  };
  $("ghosts").addEventListener("change", showGhosts);
  showGhosts();
  for (const example of EXAMPLES) {
    const button = element("button", "", example);
    button.type = "button";
    button.addEventListener("click", () => send(example));
    const item = element("li", "");
    item.append(button);
    $("examples").append(item);
  }
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = $("question").value.trim();
    if (!(question || tray.holds) || running) return;
    $("question").value = "";
    send(question);
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("add-image").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    tray.add([...$("files").files]);
    $("files").value = ""; // the same file may be chosen again
  });
  takeFiles($("chat"), tray);
  $("stop").addEventListener("click", () => running?.abort());
  $("new-chat").addEventListener("click", newChat);
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  $("close-step").addEventListener("click", () => {
    shown.pinned = false;
    $("step").classList.remove("pinned");
    shown.view?.mark(null);
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    rememberKey($("key").value);
    $("key").value = "";
    introduce();
  });
  introduce();
}

begin();
