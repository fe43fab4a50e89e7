// Images of a message: chosen, dropped or pasted, and shown with their position in the prompt.

import { element } from "./tokens.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SIDE = 96; // of what is shown, in CSS pixels

/** Image as sent to the server, and its preview on the page. */
class Image {
  constructor(name, url, likeness) {
    this.name = name;
    this.url = url;
    this.likeness = likeness;
  }

  /** Message part of the image. */
  get part() {
    return { type: "image_url", image_url: { url: this.url } };
  }

  /** Title of the image on the page. */
  get title() {
    return `${this.name}, ${this.likeness.width} × ${this.likeness.height} pixels`;
  }

  /** Preview as a canvas, because the page may not load image URLs. */
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

/** Reads and decodes a file; the server checks it again. */
async function read(file) {
  if (!TYPES.includes(file.type)) throw new Error(`${file.name} is not a PNG, JPEG, WebP or GIF image`);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
  const likeness = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} cannot be decoded by this browser`);
  });
  return new Image(file.name, url, likeness);
}

/** Images of the next message. */
export class Tray {
  /** `list` shows the images; `notify(text)` and `warn(text)` report changes. */
  constructor(list, notify, warn) {
    this._list = list;
    this._notify = notify;
    this._warn = warn;
    this._held = [];
    this.bounds = null; // from `/capabilities`; null: no image input
    this.mostBytes = Infinity; // of a request's body
  }

  /** True if there are images. */
  get holds() {
    return this._held.length > 0;
  }

  /** Adds files, or reports why a file is rejected. */
  async add(files) {
    this._warn("");
    for (const file of files) {
      try {
        this._check(file);
        const image = await read(file);
        this.putBack([...this._held, image]);
        this._notify(`Added ${image.title}`);
      } catch (error) {
        this._warn(error.message);
        return;
      }
    }
  }

  _check(file) {
    if (!this.bounds) throw new Error("This model does not support image input.");
    if (this._held.length >= this.bounds.max_images) {
      throw new Error(`A request may have at most ${this.bounds.max_images} images.`);
    }
    const length = (file.size * 4) / 3; // as base64
    const held = this._held.reduce((sum, image) => sum + image.url.length, 0);
    if (held + length > this.mostBytes) {
      const most = Math.floor((this.mostBytes * 3) / 4 / 2 ** 20);
      throw new Error(`With ${file.name} the images exceed ${most} MB.`);
    }
  }

  /** Returns all images and empties the tray. */
  take() {
    const taken = this._held;
    this.putBack([]);
    return taken;
  }

  /** Replaces all images. */
  putBack(images) {
    this._held = images;
    this._list.hidden = !images.length;
    this._list.replaceChildren(...images.map((image) => this._item(image)));
  }

  _item(image) {
    const item = element("li", "image");
    const remove = element("button", "", "✕");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${image.name}`);
    remove.addEventListener("click", () => {
      this.putBack(this._held.filter((each) => each !== image));
      this._notify(`Removed ${image.name}`);
    });
    item.append(image.draw(), remove);
    return item;
  }
}

/** Message of the user with its images. */
export class Question {
  constructor(text, images) {
    this.text = text;
    this.images = images;
    this.element = element("div", "turn user");
    this._notes = images.map((image) => {
      const figure = element("figure", "image");
      const note = element("figcaption", "quiet");
      figure.append(image.draw(), note);
      this.element.append(figure);
      return note;
    });
    this.element.append(element("div", "", text)); // below the images
  }

  /** Message of the next request: images, then the text. */
  get message() {
    const textParts = this.text ? [{ type: "text", text: this.text }] : [];
    const parts = [...this.images.map((image) => image.part), ...textParts];
    return { role: "user", content: this.images.length ? parts : this.text };
  }

  /** Writes the position of each image in the prompt. */
  place(runs) {
    this._notes.forEach((note, number) => {
      const { first, count } = runs[number];
      note.textContent = `${count} tokens from position ${first}`;
    });
  }
}

/** Positions of images in a prompt: runs of the image token. */
export function runsOf(tokens, imageToken) {
  const runs = [];
  tokens.forEach((token, at) => {
    if (token !== imageToken) return;
    if (at && tokens[at - 1] === imageToken) runs.at(-1).count++;
    else runs.push({ first: at, count: 1 });
  });
  return runs;
}

/** Adds files that are dropped on or pasted into an element to a tray. */
export function takeFiles(target, tray) {
  const has = (transfer) => [...(transfer?.types ?? [])].includes("Files");
  const over = (event) => {
    if (!has(event.dataTransfer)) return;
    event.preventDefault(); // else the browser would open the file
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
