"""Orbax checkpoints of a training run, and the check that a folder belongs to the same run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT = 2


class Saved:
    """Checkpoints of a run: its state by array name, and the elapsed seconds."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def __enter__(self) -> "Saved":
        return self

    def __exit__(self, *fault: object) -> None:
        self._manager.close()

    def newest(self, state: Any) -> tuple[Any, float]:
        """Returns the newest state and the run's elapsed seconds; `state` if none is stored."""
        step = self._manager.latest_step()
        if step is None:
            return state, 0.0
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _named(state))
        parts = ocp.args.Composite(
            state=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=parts)
        leaves = [restored["state"][name] for name in _named(state)]
        return jax.tree.unflatten(jax.tree.structure(state), leaves), restored["run"]["seconds"]

    def write(self, state: Any, step: int, seconds: float) -> None:
        """Writes a checkpoint and waits, because the next step donates the state."""
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(state)), run=ocp.args.JsonSave({"seconds": seconds})
        )
        self._manager.save(step, args=parts)
        self._manager.wait_until_finished()


def _named(state: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def note_run(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes the settings of a run to its folder, or compares them with those in the folder.

    Args:
      folder: Folder of the run, created if needed.
      facts: Settings that must be equal to resume the run, as JSON values.

    Raises:
      ValueError: The folder holds a run with other settings; the message names the first one.
    """
    path = folder / "run.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted({*known, *facts}):
        if known.get(name) != facts.get(name):
            raise ValueError(
                f"{folder} holds a run with another {name}: {known.get(name)!r:.80}, got "
                f"{facts.get(name)!r:.80}. Repeat the settings of that run to resume it, set "
                "another --out, or use --no-resume to start from the beginning"
            )
