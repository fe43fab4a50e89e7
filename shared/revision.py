"""Source revision of a checkout."""

import subprocess

from shared.children import FOLDER

TIMEOUT_S = 5.0


def revision() -> str | None:
    """Returns the abbreviated commit of the checkout; None for an installed package."""
    if not (FOLDER / ".git").exists():
        return None
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
