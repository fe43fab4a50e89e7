"""Work for processes that share items: it ends, fails, stays, or ends its process."""

import os
import time


def worked(item: str) -> str:
    """Performs the action of the item."""
    if item == "ends":
        os._exit(3)
    if item == "raises":
        raise ValueError("wrong")
    time.sleep(600 if item == "stays" else 0)
    return f"{item} by {os.getpid()}"
