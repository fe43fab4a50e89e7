"""Benchmarks of block heads: the choice in simulated time, and shapes of one start."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.speculation import adaptive, adaptive_block_trees, block_heads
from shared.engine.adaptive.tiers import Tier
from tests.support.simulation.phases import Phase, Served

DEMO = Path(__file__).parents[2] / "models" / "demo"
TIERS = (Tier(1, 0, 0), Tier(8, 7, 1), Tier(16, 7, 8))


def test_simulated_line_compares_with_better_shape() -> None:
    line = adaptive_block_trees.measure("chat", 1, 60)
    speeds = line["tokens_per_s"]
    best = max(speeds["chain"], speeds["tree"])
    assert line["adaptive_by_best"] == pytest.approx(speeds["adaptive"] / best, abs=1e-3)
    assert speeds["tree"] > speeds["chain"]
    assert "chat" in adaptive_block_trees.line_of(line)


def test_block_heads_lines_add_phases() -> None:
    def served(seconds: float, accepted: int) -> list[Served]:
        return [Served(f"phase {n}", 30, seconds, 9, rows=10, accepted=accepted) for n in (1, 2)]

    runs = dict(zip(map(str, TIERS), (served(3, 0), served(2, 20), served(1.5, 30)), strict=True))
    first, _, every = block_heads.lines_of(runs | {"adaptive": served(1.6, 28)}, TIERS)
    assert (first["phase"], every["phase"]) == ("phase 1", "all")
    assert list(every["tokens_per_step"].values()) == [1, 3, 4, 3.8]
    assert list(every["tokens_per_s"].values()) == [10, 15, 20, 18.8]
    assert every["adaptive_by_best"] == pytest.approx(0.94)
    assert every["tokens_are_equal"]


def test_alternating_runs_reverse_every_other_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[tuple[str, str]]()

    def served(engine: SimpleNamespace, phases: list[Phase], clock: object) -> list[Served]:
        order.append((engine.name, phases[0].name))
        return [Served(phases[0].name, 10, float(len(order)), 1)]

    def start(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, metrics=SimpleNamespace(snapshot=dict))

    monkeypatch.setattr(adaptive, "serve", served)
    starts = {name: partial(start, name) for name in ("chain", "tree")}
    phases = [Phase(name, 1, []) for name in ("first", "second")]
    runs = adaptive.alternating_runs(starts, phases, 2)
    once = [("chain", "first"), ("tree", "first"), ("chain", "second"), ("tree", "second")]
    reversed_once = [once[n] for n in (1, 0, 3, 2)]
    assert order == once + reversed_once
    assert {name: [each.seconds for each in found] for name, found in runs.items()} == {
        "chain": [1, 3],
        "tree": [2, 4],
    }


def test_block_heads_rejects_other_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no block_size in its config; give a DFlash head"):
        block_heads.tiers_of(DEMO / "eagle", [16], 8)
    with pytest.raises(ValueError, match="give NAME=DIR"):
        block_heads.named_head("dflash")


@pytest.mark.matrix
def test_block_heads_serves_all_shapes(tmp_path: Path) -> None:
    """A causal mask in a bidirectional head: its drafts are worse, and the output is the same."""
    shutil.copy(DEMO / "dflash" / "model.safetensors", tmp_path)
    config = json.loads((DEMO / "dflash" / "config.json").read_text(encoding="utf-8"))
    config["dflash_config"]["causal_head"] = True
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ["--model", str(DEMO / "target"), "--heads", f"jetspec={tmp_path}", "--nodes", "16"]
    words += ["--count", "1", "--max-tokens", "12", "--rounds", "1"]
    given = block_heads.options(words)
    ((name, folder),) = given.heads
    *lines, times = block_heads.measure("torch", name, folder, given)
    phases = [line["phase"].partition(",")[0] for line in lines]
    assert phases == ["problems", "copying", "chats", "all"]
    shapes = {"none", "S7", "S7k8N16", "adaptive"}
    assert all(line["tokens_per_step"].keys() == shapes for line in lines)
    assert all(line["tokens_are_equal"] for line in lines)
    assert lines[-1]["tokens_per_step"]["none"] == 1
    assert lines[-1]["tokens_per_step"]["S7k8N16"] >= lines[-1]["tokens_per_step"]["S7"] > 1
    assert times["ms_per_step"][1].keys() == shapes - {"adaptive"}
