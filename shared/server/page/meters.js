// Summary of the steps of an answer: three numbers, and a bar for each step.

import { shade } from "./tokens.js";
import { isCut, svg } from "./tree.js";

const BAR = 9, GAP = 3, ROW = 6; // of the strip

const verified = (step) => step.source !== "prefill";
const accepted = (step) => step.drafts.filter((draft) => draft.accepted).length;
const used = (step) => step.drafts.filter((draft) => draft.accepted && !isCut(step, draft)).length;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Returns acceptance length, tokens/s and milliseconds per step; null before the first step. */
export function summary(steps) {
  const decoded = steps.filter(verified);
  const last = steps.at(-1), begun = steps[0];
  if (!decoded.length) return { length: null, speed: null, step: null };
  const seconds = (last.time_ms - begun.time_ms) / 1e3;
  const tokens = decoded.reduce((sum, step) => sum + step.tokens.length, 0);
  const device = decoded.map((step) => step.device_ms).filter((value) => value !== null);
  return {
    length: mean(decoded.map((step) => accepted(step) + 1)),
    speed: seconds ? tokens / seconds : null,
    step: device.length ? mean(device) : mean(decoded.map((step) => step.host_ms)),
  };
}

/** Describes a step in one line: time, batch and duration. */
export function describe(step) {
  const parts = [`${step.time_ms.toFixed(0)} ms after arrival`];
  parts.push(step.batch_size === 1 ? "alone in its batch" : `batch of ${step.batch_size}`);
  const took = step.device_ms ?? step.host_ms;
  const where = step.device_ms === null ? "with host time" : "on the device";
  parts.push(`${took.toFixed(1)} ms ${where}`);
  return parts.join(" · ");
}

/** Returns the title of a step, with the number of accepted drafts. */
export function title(step) {
  const drafts = step.drafts.length;
  if (step.source === "prefill") return "Prefill and first token";
  if (!drafts) return `Step ${step.index}: no drafts`;
  const taken = accepted(step), kept = used(step);
  const end = kept < taken ? `, ${kept} used: the output ended` : "";
  return `Step ${step.index}: ${taken} of ${drafts} drafts accepted${end}`;
}

/** Writes the numbers into the page. */
export function showMeters(found) {
  const write = (id, value, digits, unit = "") => {
    const place = document.getElementById(id);
    place.textContent = value === null ? "–" : value.toFixed(digits);
    if (value !== null && unit) place.append(Object.assign(document.createElement("small"),
      { textContent: ` ${unit}` }));
  };
  write("m-length", found.length, 2);
  write("m-speed", found.speed, found.speed < 100 ? 1 : 0);
  write("m-step", found.step, 1, "ms");
}

function frame(place, rows) {
  const at = { x: place * (BAR + GAP), y: 0.5, width: BAR + 2, height: rows * ROW - 1 };
  return svg("rect", { ...at, rx: 2, class: "frame" });
}

/** Draws a bar for each recent step; a click calls `pick(step)`. */
export function drawStrip(target, steps, chosen, pick) {
  const room = Math.max(10, Math.floor((target.clientWidth || 320) / (BAR + GAP)));
  const shown = steps.filter(verified).slice(-room);
  target.parentElement.hidden = !shown.length;
  if (!shown.length) return;
  const depth = (step) => Math.max(0, ...step.drafts.map((draft) => draft.depth));
  const rows = Math.max(...shown.map(depth)) + 1;
  const bars = shown.map((step, place) => {
    const cell = (row, className) => {
      const at = { x: place * (BAR + GAP) + 1, y: (rows - 1 - row) * ROW };
      return svg("rect", { ...at, width: BAR, height: ROW - 1, class: className });
    };
    const taken = step.drafts.filter((draft) => draft.accepted);
    const cells = taken.map((draft, row) => cell(row, shade(draft.origin, draft.depth)));
    cells.push(cell(taken.length, "own"));
    for (let row = taken.length + 1; row <= depth(step); row++) cells.push(cell(row, "rejected"));
    if (step === chosen) cells.push(frame(place, rows));
    const group = svg("g", {}, ...cells);
    group.addEventListener("click", () => pick(step));
    return group;
  });
  target.setAttribute("height", rows * ROW);
  target.replaceChildren(...bars);
}
