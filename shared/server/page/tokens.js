// View of one answer: its tokens, coloured by origin and draft depth, and their steps.

const DEEPEST = 6; // shades

/** Creates an element with a class and a text. */
export function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Returns the CSS classes of a token or draft: origin and depth. */
export function shade(origin, depth) {
  return depth ? `${origin} d${Math.min(depth, DEEPEST)}` : origin;
}

/** Returns the rejected drafts of the first-child path below the last accepted draft. */
function rejected(step) {
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

/** View of the answer to one request. */
export class AnswerView {
  /** `select(step, view, pinned)` is called when a token is pointed at, focused or clicked. */
  constructor(select) {
    this.steps = [];
    this.content = "";
    this.element = element("article", "turn assistant");
    this.element.setAttribute("aria-label", "Answer");
    this.text = element("div", "text");
    this.note = element("p", "note quiet");
    this.element.append(this.text, this.note);
    this._listen(select);
  }

  /** Message of the answer in the chat's next request. */
  get message() {
    return { role: "assistant", content: this.content };
  }

  /** Adds a choice of a stream event, and returns its step. */
  take(choice) {
    this.content += choice.delta?.content ?? choice.text ?? "";
    const step = choice.trace;
    if (!step) return null;
    const before = this.steps.at(-1)?.tokens.at(-1);
    this.steps.push({ ...step, index: this.steps.length, root: before?.name ?? "" });
    const ghosts = rejected(step);
    step.tokens.forEach((token) => {
      if (!token.node) this._addGhosts(ghosts); // rejected in favour of this token
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
    // Tokens without text: within a character, or at the end of the output.
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

  /** Moves the focus between tokens by arrow keys; the Tab key stops once per answer. */
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
