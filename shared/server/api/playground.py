"""Web page at `/`: static files that call this server only."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, Response

from shared.server.protocol.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"

HEADERS = {
    # The page loads only its own files and runs no inline scripts.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PARTS = {path.name: _TYPES[path.suffix] for path in FOLDER.iterdir() if path.suffix in _TYPES}
"""Media types of the page's files, by name."""


async def page() -> Response:
    """GET /: the playground."""
    return FileResponse(FOLDER / "index.html", headers=HEADERS, media_type="text/html")


async def part(name: str) -> Response:
    """GET /playground/NAME: a file of the page."""
    if name not in PARTS:
        raise ApiError(404, f"unknown file of the playground: {name!r:.100}")
    return FileResponse(FOLDER / name, headers=HEADERS, media_type=PARTS[name])
