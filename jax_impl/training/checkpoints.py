"""Checkpoints of a run in Orbax form, and whether a folder holds those of the same run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT = 2


class Saved:
    """The checkpoints of a run: its state by the names of the arrays, and the seconds it took."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def __enter__(self) -> "Saved":
        return self

    def __exit__(self, *fault: object) -> None:
        self._manager.close()

    def newest(self, state: Any) -> tuple[Any, float]:
        """The newest state and the run's seconds so far; `state` itself where there is none."""
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
        """Writes a checkpoint; the next step may overwrite the state, so it waits."""
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(state)), run=ocp.args.JsonSave({"seconds": seconds})
        )
        self._manager.save(step, args=parts)
        self._manager.wait_until_finished()


def _named(state: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def note_run(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes down what a run is, or checks that it is the one that the folder holds.

    Args:
      facts: What must be equal for the run to go on, as JSON holds it.

    Raises:
      ValueError: The folder holds another run; one sentence that names the difference.
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
                f"{folder} holds a run with another {name}; go on with its own settings, name "
                "another --out, or give --no-resume to start anew"
            )
