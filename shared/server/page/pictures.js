// Pictures that a question brings: chosen, dropped or pasted, and shown where they stand.

import { element } from "./tokens.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SIDE = 96; // of what is shown, in CSS pixels

/** A picture as a client sends it, and its likeness on the page. */
class Picture {
  constructor(name, url, likeness) {
    this.name = name;
    this.url = url;
    this.likeness = likeness;
  }

  /** The part of a message that it is. */
  get part() {
    return { type: "image_url", image_url: { url: this.url } };
  }

  /** How it is called on the page. */
  get title() {
    return `${this.name}, ${this.likeness.width} × ${this.likeness.height} pixels`;
  }

  /** A small canvas: pictures of addresses are nothing that the page may load. */
  draw() {
    const { width, height } = this.likeness;
    const scale = (SIDE * devicePixelRatio) / Math.max(width, height, 1);
    const canvas = element("canvas", "");
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    canvas.getContext("2d").drawImage(this.likeness, 0, 0, canvas.width, canvas.height);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", this.title);
    canvas.title = this.title;
    return canvas;
  }
}

/** What the browser makes of a file; the server looks again. */
async function read(file) {
  if (!TYPES.includes(file.type)) throw new Error(`${file.name} is no PNG, JPEG, WebP or GIF`);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
  const likeness = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no picture that this browser can show`);
  });
  return new Picture(file.name, url, likeness);
}

/** The pictures that go with the next question. */
export class Tray {
  /** `list` shows them; `tell(text)` and `warn(text)` say what became of them. */
  constructor(list, tell, warn) {
    this._list = list;
    this._tell = tell;
    this._warn = warn;
    this._held = [];
    this.bounds = null; // of `/capabilities`; null: the model sees none
    this.mostBytes = Infinity; // of a request's body
  }

  /** Whether it holds some. */
  get holds() {
    return this._held.length > 0;
  }

  /** Adds files, or says why one is not taken. */
  async add(files) {
    this._warn("");
    for (const file of files) {
      try {
        this._check(file);
        const picture = await read(file);
        this.putBack([...this._held, picture]);
        this._tell(`Added ${picture.title}`);
      } catch (error) {
        this._warn(error.message);
        return;
      }
    }
  }

  _check(file) {
    if (!this.bounds) throw new Error("the model that is served sees no pictures");
    if (this._held.length >= this.bounds.max_images) {
      throw new Error(`a request has at most ${this.bounds.max_images} pictures`);
    }
    const length = (file.size * 4) / 3; // as base64
    const held = this._held.reduce((sum, picture) => sum + picture.url.length, 0);
    if (held + length > this.mostBytes) {
      const most = Math.floor((this.mostBytes * 3) / 4 / 2 ** 20);
      throw new Error(`with ${file.name} the pictures are larger than ${most} MB together`);
    }
  }

  /** All of them; the tray is empty then. */
  take() {
    const taken = this._held;
    this.putBack([]);
    return taken;
  }

  /** Holds these and no others. */
  putBack(pictures) {
    this._held = pictures;
    this._list.hidden = !pictures.length;
    this._list.replaceChildren(...pictures.map((picture) => this._item(picture)));
  }

  _item(picture) {
    const item = element("li", "picture");
    const remove = element("button", "", "✕");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.addEventListener("click", () => {
      this.putBack(this._held.filter((each) => each !== picture));
      this._tell(`Removed ${picture.name}`);
    });
    item.append(picture.draw(), remove);
    return item;
  }
}

/** A question with its pictures as a turn of the chat. */
export class Question {
  constructor(text, pictures) {
    this.text = text;
    this.pictures = pictures;
    this.element = element("div", "turn user");
    this._notes = pictures.map((picture) => {
      const figure = element("figure", "picture");
      const note = element("figcaption", "quiet");
      figure.append(picture.draw(), note);
      this.element.append(figure);
      return note;
    });
    this.element.append(element("div", "", text)); // below the pictures
  }

  /** The message for the chat's next request: pictures, then the text. */
  get message() {
    const said = this.text ? [{ type: "text", text: this.text }] : [];
    const parts = [...this.pictures.map((picture) => picture.part), ...said];
    return { role: "user", content: this.pictures.length ? parts : this.text };
  }

  /** Says of each picture where it stands in the prompt. */
  place(runs) {
    this._notes.forEach((note, number) => {
      const { first, count } = runs[number];
      note.textContent = `${count} tokens, from ${first} on`;
    });
  }
}

/** Where pictures stand in a prompt: the runs of the token that stands for them. */
export function runsOf(tokens, imageToken) {
  const runs = [];
  tokens.forEach((token, at) => {
    if (token !== imageToken) return;
    if (at && tokens[at - 1] === imageToken) runs.at(-1).count++;
    else runs.push({ first: at, count: 1 });
  });
  return runs;
}

/** Has files that are dropped on or pasted into an element go to a tray. */
export function takeFiles(target, tray) {
  const has = (transfer) => [...(transfer?.types ?? [])].includes("Files");
  const over = (event) => {
    if (!has(event.dataTransfer)) return;
    event.preventDefault(); // else the browser would leave the page for the file
    target.classList.toggle("dropping", event.type === "dragover");
  };
  target.addEventListener("dragover", over);
  target.addEventListener("dragleave", over);
  target.addEventListener("drop", (event) => {
    over(event);
    if (has(event.dataTransfer)) tray.add([...event.dataTransfer.files]);
  });
  target.addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    tray.add([...event.clipboardData.files]);
  });
}
