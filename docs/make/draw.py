"""Writes the drawings of `docs/images`: one device step, and a draft tree under verification.

`python -m docs.make.draw` writes both files; a test compares them with the output of this module.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "images"

_STYLE = """
  text { font: 14px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328 }
  .small { font-size: 12px } .bold { font-weight: 600 } .middle { text-anchor: middle }
  .end { text-anchor: end } .muted { fill: #59636e }
  .card { fill: #ffffff; stroke: #d1d9e0 } .lane { fill: #f6f8fa; stroke: none }
  .host { fill: #ddf4ff; stroke: #0969da } .device { fill: #dafbe1; stroke: #1a7f37 }
  .node { fill: #f6f8fa; stroke: #818b98 } .accepted { fill: #dafbe1; stroke: #1a7f37 }
  .bonus { fill: #fff8c5; stroke: #9a6700 } .hidden { fill: none; stroke: #d1d9e0 }
  .visible { fill: #54aeff; stroke: #d1d9e0 } .context { fill: #b6e3ff; stroke: #d1d9e0 }
  .line { stroke: #59636e; fill: none; stroke-width: 1.5 }
  .path { stroke: #1a7f37; fill: none; stroke-width: 3 }
  .dashed { stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .muted { fill: #9198a1 }
    .card { fill: #0d1117; stroke: #3d444d } .lane { fill: #151b23 }
    .host { fill: #0c2d6b; stroke: #4493f8 } .device { fill: #033a16; stroke: #3fb950 }
    .node { fill: #212830; stroke: #9198a1 } .accepted { fill: #033a16; stroke: #3fb950 }
    .bonus { fill: #4b2900; stroke: #d29922 } .hidden { stroke: #3d444d }
    .visible { fill: #1f6feb; stroke: #3d444d } .context { fill: #0c2d6b; stroke: #3d444d }
    .line { stroke: #9198a1 } .path { stroke: #3fb950 }
  }
"""
_ARROW = (
    '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="line" d="M 1 1 L 9 5 L 1 9"/></marker>'
)


def drawings() -> dict[str, str]:
    """Returns the text of each drawing by its file name."""
    return {"device_step.svg": device_step(), "draft_tree.svg": draft_tree()}


def device_step() -> str:
    """Draws the phases of a decode step, and the host planning the next step meanwhile."""
    return _svg(960, 340, "One decode step", _STEP_SUMMARY, list(_step_parts()))


_STEP_SUMMARY = (
    "The host plans step n + 1 while the device runs step n: draft, verify, accept, commit and "
    "draft extend. One buffer is uploaded and one array is downloaded per step."
)
_PHASES = (
    ("draft", "drafter builds", "the tree", 104),
    ("verify", "target pass", "over all nodes", 150),
    ("accept", "sampling,", "accepted path", 104),
    ("commit", "KV, states,", "counts", 104),
    ("draft extend", "drafter reads", "accepted tokens", 124),
)
_DEVICE_FROM, _LANE_FROM = 230, 90


def _step_parts() -> Iterator[str]:
    yield _box(_LANE_FROM, 20, 850, 110, "lane")
    yield _box(_LANE_FROM, 190, 850, 110, "lane")
    yield _text(24, 80, "Host", "bold")
    yield _text(24, 250, "Device", "bold")
    at = _DEVICE_FROM
    for name, first, second, width in _PHASES:
        yield _labelled(at, 200, width, 90, "device", (name, first, second))
        at += width
    end = at
    yield _labelled(100, 30, 110, 90, "host", ("plan n", "rows, pages,", "draft shape"))
    yield _labelled(310, 30, 190, 90, "host", ("retire n - 1", "append tokens,", "send to clients"))
    yield _labelled(
        500, 30, 200, 90, "host", ("plan n + 1", "lengths of step n", "unknown: reserve")
    )
    yield _labelled(end + 14, 30, 110, 90, "host", ("retire n", "accepted", "tokens"))
    yield _labelled(end, 200, 124, 90, "device", ("step n + 1", "starts at once,", "no host wait"))
    yield _arrow(155, 120, _DEVICE_FROM + 8, 198)
    yield _text(120, 165, "StepPlan n", "small muted")
    yield _arrow(600, 120, end + 6, 198)
    yield _text(560, 165, "StepPlan n + 1", "small muted")
    yield _arrow(end - 6, 198, end + 60, 122)
    yield _text(end + 66, 165, "StepResult", "small muted")
    yield _arrow(_LANE_FROM, 318, 940, 318)
    yield _text(98, 334, "time", "small muted")


def draft_tree() -> str:
    """Draws a draft tree, its attention mask, the accepted path and the bonus token."""
    return _svg(960, 430, "A draft tree under verification", _TREE_SUMMARY, list(_tree_parts()))


TOKENS = ("sat", "on", "down", "the", "a", "and", "mat", "rug")
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3)
ACCEPTED = (0, 1, 3)
BONUS = "sofa"
_PLACES = (
    (50, 180),
    (150, 120),
    (150, 260),
    (260, 80),
    (260, 170),
    (260, 260),
    (370, 50),
    (370, 120),
)
_TREE_SUMMARY = (
    "Eight nodes. Each node attends to the committed tokens, its ancestors and itself. The path "
    "sat, on, the is accepted; sofa, the target's choice after it, is the bonus token."
)
_CELL, _MASK_LEFT, _MASK_TOP = 26, 660, 70


def ancestors(node: int) -> set[int]:
    """Returns the nodes that `node` attends to: itself and its ancestors."""
    return {node} if PARENTS[node] < 0 else {node} | ancestors(PARENTS[node])


def _tree_parts() -> Iterator[str]:
    yield _text(24, 32, "Draft tree", "bold")
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            kind = "path" if node in ACCEPTED else "line"
            yield _line(*_PLACES[parent], *_PLACES[node], kind)
    yield _line(*_PLACES[ACCEPTED[-1]], 370, 190, "line dashed")
    for node, (x, y) in enumerate(_PLACES):
        yield _node(x, y, f"{node} {TOKENS[node]}", "accepted" if node in ACCEPTED else "node")
    yield _node(370, 190, BONUS, "bonus")
    yield _text(414, 186, "bonus token: the", "small muted")
    yield _text(414, 202, "target's choice", "small muted")
    yield _text(14, 148, "newest token", "small muted")
    yield from _mask()
    yield from _after()


def _mask() -> Iterator[str]:
    yield _text(600, 32, "Tree mask", "bold")
    yield _text(640, 58, "context", "small muted end")
    for node, token in enumerate(TOKENS):
        x, y = _MASK_LEFT + _CELL * node, _MASK_TOP + _CELL * node
        yield _text(x + _CELL / 2, 60, str(node), "small middle")
        yield _text(586, y + 18, f"{node} {token}", "small end")
        yield _box(596, y, 52, _CELL, "context")
        for other in range(len(TOKENS)):
            kind = "visible" if other in ancestors(node) else "hidden"
            yield _box(_MASK_LEFT + _CELL * other, y, _CELL, _CELL, kind)
        depth = len(ancestors(node)) - 1
        yield _text(_MASK_LEFT + _CELL * 8 + 8, y + 18, f"L + {depth}" if depth else "L", "small")
    yield _text(_MASK_LEFT + _CELL * 8 + 8, 58, "position", "small muted")
    yield _text(
        596, _MASK_TOP + _CELL * 8 + 22, "A node attends to the context, its", "small muted"
    )
    yield _text(596, _MASK_TOP + _CELL * 8 + 38, "ancestors and itself.", "small muted")


def _after() -> Iterator[str]:
    yield _text(24, 335, "KV cache after the commit", "bold")
    yield _labelled(24, 350, 170, 44, "context", ("context: positions 0 to L - 1",))
    at = 194
    for offset, node in enumerate(ACCEPTED):
        yield _labelled(at, 350, 80, 44, "accepted", (TOKENS[node],))
        yield _text(at + 40, 412, f"L + {offset}" if offset else "L", "small muted middle")
        at += 80
    yield _labelled(at + 10, 350, 80, 44, "bonus", (BONUS,))
    yield _text(at + 100, 368, "newest token, root of the next tree;", "small muted")
    yield _text(at + 100, 384, "acceptance length 3: on, the, sofa", "small muted")


def _svg(width: int, height: int, title: str, summary: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'width="{width}" height="{height}" aria-labelledby="title summary">'
    )
    named = [f'<title id="title">{title}</title>', f'<desc id="summary">{escape(summary)}</desc>']
    card = f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>'
    styled = [f"<style>{_STYLE}</style>", f"<defs>{_ARROW}</defs>", card]
    return "\n".join([head, *named, *styled, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _labelled(
    x: float, y: float, width: float, height: float, kind: str, lines: Sequence[str]
) -> str:
    first, *others = lines
    middle, top = x + width / 2, y + height / 2 - 9 * len(others) + 5
    rest = [_text(middle, top + 18 * (i + 1), o, "small middle") for i, o in enumerate(others)]
    title = _text(middle, top, first, "bold middle" if others else "small middle")
    return "\n".join([_box(x, y, width, height, kind), title, *rest])


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<path class="{kind}" d="M {x:g} {y:g} L {to_x:g} {to_y:g}"/>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return _line(x, y, to_x, to_y, "line").replace("/>", ' marker-end="url(#arrow)"/>')


def _node(x: float, y: float, label: str, kind: str) -> str:
    box = f'<rect class="{kind}" x="{x - 36:g}" y="{y - 15:g}" width="72" height="30" rx="15"/>'
    return f"{box}\n{_text(x, y + 5, label, 'middle')}"


def main() -> None:
    """Writes the drawings."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
