// One answer on the page: its tokens by how they came, and the steps that made them.

const DEEPEST = 6; // shades

/** An element with a class and a text. */
export function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

/** The class of a token's or a draft's shade. */
export function shade(origin, depth) {
  return depth ? `${origin} d${Math.min(depth, DEEPEST)}` : origin;
}

/** The drafts that the drafter held for the likeliest where the target said something else. */
function refused(step) {
  const taken = step.drafts.filter((draft) => draft.accepted);
  const found = [];
  let node = taken.length ? taken.at(-1).node : 0;
  for (;;) {
    const next = step.drafts.find((draft) => draft.parent === node);
    if (!next) return found;
    found.push(next);
    node = next.node;
  }
}

/** The answer of one request. */
export class AnswerView {
  /** `select(step, element)` is called when a token is pointed at; null when no longer. */
  constructor(select) {
    this.steps = [];
    this.said = "";
    this.element = element("article", "turn assistant");
    this.element.setAttribute("aria-label", "Answer");
    this.text = element("div", "text");
    this.note = element("p", "note quiet");
    this.element.append(this.text, this.note);
    this._listen(select);
  }

  /** The message for the chat's next request. */
  get message() {
    return { role: "assistant", content: this.said };
  }

  /** Adds what an event of the stream brought, and returns its step. */
  take(choice) {
    this.said += choice.delta?.content ?? choice.text ?? "";
    const step = choice.trace;
    if (!step) return null;
    const before = this.steps.at(-1)?.tokens.at(-1);
    this.steps.push({ ...step, index: this.steps.length, root: before?.name ?? "" });
    const ghosts = refused(step);
    step.tokens.forEach((token) => {
      if (!token.node) this._addGhosts(ghosts); // they stood where the target's own token stands
      this._add(token);
    });
    return this.steps.at(-1);
  }

  _add(token) {
    const span = element("span", `token ${shade(token.origin, token.depth)}`);
    span.dataset.step = this.steps.length - 1;
    span.dataset.origin = token.origin;
    span.dataset.depth = token.depth;
    span.setAttribute("aria-describedby", "step-summary");
    span.tabIndex = this.text.querySelector(".token") ? -1 : 0;
    for (const part of token.text.split(/(\n)/)) {
      if (part === "\n") span.append(element("span", "mark", "↵"));
      span.append(part);
    }
    // A part of a character, or the end of a text, says nothing by itself.
    if (!token.text) {
      const name = token.name.startsWith("bytes:") ? "·" : token.name;
      span.append(element("span", "mark", name));
    }
    this.text.append(span);
  }

  _addGhosts(ghosts) {
    if (!ghosts.length) return;
    const words = ghosts.map((draft) => draft.text.replaceAll("\n", "↵")).join("");
    this.text.append(element("del", "ghost", words));
  }

  _listen(select) {
    const pick = (event) => {
      const token = event.target.closest?.(".token");
      if (token) select(this.steps[token.dataset.step], this, event.type === "click");
    };
    this.text.addEventListener("pointerover", pick);
    this.text.addEventListener("focusin", pick);
    this.text.addEventListener("click", pick);
    this.text.addEventListener("keydown", (event) => this._walk(event));
  }

  /** Arrow keys go from token to token: the answer is one stop of the tab key. */
  _walk(event) {
    const way = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    const tokens = [...this.text.querySelectorAll(".token")];
    const next = tokens[tokens.indexOf(event.target.closest(".token")) + way];
    if (!way || !next) return;
    event.preventDefault();
    event.target.closest(".token").tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  /** Frames the tokens of a step. */
  mark(step) {
    for (const token of this.text.querySelectorAll(".token")) {
      token.classList.toggle("same-step", step !== null && +token.dataset.step === step.index);
    }
  }
}
