"""Source revision of a checkout."""

import subprocess

from shared.children import FOLDER

TIMEOUT_S = 5.0


def revision() -> str | None:
    """Returns the abbreviated commit of the checkout; None for an installed package."""
    return git("rev-parse", "--short=12", "HEAD") or None


def git(*words: str) -> str:
    """Returns the output of a git command in the checkout; empty if there is none or it fails."""
    if not (FOLDER / ".git").exists():
        return ""
    command = ["git", "-C", str(FOLDER), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
