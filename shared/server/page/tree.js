// Drawing of a step's draft tree: the root is at the top, accepted drafts are coloured.

import { shade } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";
const COLUMN = 66, ROW = 40, HEIGHT = 22, LETTERS = 8;

/** Creates an SVG element with attributes. */
export function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Returns a token's text, shortened for a node. */
function label(text) {
  const shown = text.replaceAll("\n", "↵").replaceAll(" ", "␣");
  return shown.length > LETTERS ? `${shown.slice(0, LETTERS - 1)}…` : shown;
}

/** Returns true if a draft was accepted after the end of the output, which then lacks its token. */
export function isCut(step, draft) {
  return draft.accepted && !step.tokens.some((token) => token.node === draft.node);
}

/** Returns all nodes with their classes: the newest token, the drafts and the target's token. */
function nodesOf(step) {
  const own = step.tokens.find((token) => !token.node);
  const path = step.drafts.filter((draft) => draft.accepted);
  const nodes = [{ node: 0, parent: null, depth: 0, text: step.root, kind: "root" }];
  for (const draft of step.drafts) {
    const cut = isCut(step, draft) ? " cut" : "";
    const kind = draft.accepted ? `taken ${shade(draft.origin, draft.depth)}${cut}` : "rejected";
    nodes.push({ ...draft, kind });
  }
  if (own) {
    const parent = path.at(-1)?.node ?? 0;
    nodes.push({ node: -1, parent, depth: path.length + 1, text: own.name, kind: "own" });
  }
  return nodes;
}

/** Sets the column of each node: first child below it, others as far left as possible. */
function place(nodes) {
  const children = new Map(nodes.map((node) => [node.node, []]));
  // Accepted drafts are on the left, so the output reads straight down.
  const rank = (node) => (node.kind === "rejected" ? 1 : 0);
  for (const node of nodes) if (node.parent !== null) children.get(node.parent).push(node);
  const ends = []; // the first free column of each row
  const visit = (node, least) => {
    node.column = Math.max(least, ends[node.depth] ?? 0);
    const below = children.get(node.node).sort((a, b) => rank(a) - rank(b));
    below.forEach((child, index) => visit(child, node.column + Math.min(index, 1)));
    // If the column of the first child is further right, the node moves above the child.
    if (below.length) node.column = below[0].column;
    ends[node.depth] = node.column + 1;
  };
  visit(nodes[0], 0);
  return Math.max(...ends);
}

/** Describes a draft that is not part of the output. */
function fate(kind) {
  if (kind === "rejected") return "(rejected)";
  return kind.endsWith(" cut") ? "(accepted, after the end of the text)" : "";
}

/** Draws the tree of a step into an element. */
export function drawTree(target, step) {
  const nodes = nodesOf(step);
  const columns = place(nodes);
  const at = new Map(nodes.map((node) => [node.node, node]));
  const x = (node) => (node.column + 0.5) * COLUMN;
  const y = (node) => node.depth * ROW + HEIGHT / 2 + 1;
  const edges = [], shapes = [];
  for (const node of nodes) {
    if (node.parent !== null) edges.push(edge(at.get(node.parent), node, x, y));
    const box = { x: x(node) - COLUMN / 2 + 4, y: y(node) - HEIGHT / 2, rx: 5 };
    const text = svg("text", { x: x(node), y: y(node) + 4, "text-anchor": "middle" });
    text.textContent = label(node.text);
    const title = svg("title", {});
    title.textContent = `${node.text} ${fate(node.kind)}`;
    const rect = svg("rect", { ...box, width: COLUMN - 8, height: HEIGHT });
    shapes.push(svg("g", { class: node.kind, "data-node": node.node }, title, rect, text));
  }
  const rows = Math.max(...nodes.map((node) => node.depth)) + 1;
  target.setAttribute("width", columns * COLUMN);
  target.setAttribute("height", (rows - 1) * ROW + HEIGHT + 2);
  // Edges of accepted drafts are drawn last.
  edges.sort((a, b) => a.classList.contains("taken") - b.classList.contains("taken"));
  target.replaceChildren(...edges, ...shapes);
}

function edge(above, below, x, y) {
  const top = y(above) + HEIGHT / 2, bottom = y(below) - HEIGHT / 2, middle = (top + bottom) / 2;
  const d = `M${x(above)} ${top}C${x(above)} ${middle} ${x(below)} ${middle} ${x(below)} ${bottom}`;
  return svg("path", { d, class: below.kind === "rejected" ? "rejected" : "taken" });
}
