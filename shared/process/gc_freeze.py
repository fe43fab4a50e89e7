"""What a start leaves behind is for good, so the garbage collector need not look at it again."""

import gc


def settle() -> None:
    """Takes all that exists now out of the collector's sight.

    Modules, programs and weights are millions of objects, and a full collection walks them all
    while every stream waits. What requests leave is little.
    """
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """Lets go of what a start before left behind, for one that follows in the same process."""
    gc.unfreeze()
    gc.collect()


def sweep() -> None:
    """Frees an engine that has ended, and keeps what else exists out of the collector's sight."""
    unsettle()
    gc.freeze()
