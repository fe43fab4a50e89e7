"""Garbage collection: freezes objects created at startup so that collections do not scan them."""

import gc


def freeze_gc() -> None:
    """Freezes all existing objects.

    Modules, programs and weights are millions of objects, and a full collection would scan them
    while all requests wait. Requests leave little garbage.
    """
    gc.collect()
    gc.freeze()


def unfreeze_gc() -> None:
    """Unfreezes the objects of an earlier engine in the same process."""
    gc.unfreeze()
    gc.collect()


def sweep() -> None:
    """Frees the objects of an engine that has ended, and freezes the rest."""
    unfreeze_gc()
    gc.freeze()
