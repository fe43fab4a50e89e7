"""Requests with LoRA adapters: text of the merged model, with every kind of step and neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from shared.engine.metrics import MAX_ADAPTERS, REQUESTS, Metrics
from shared.engine.request import AdapterVersion, CacheNamespace
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from tests.support.lora_engine import GREEDY, PROMPT, SAMPLED, engine_of, request, texts
from tests.support.lora_files import module_names, write_adapter, write_merged
from tests.support.run_engine import drive
from tests.support.tiny_models import write_tiny

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of all modules of a hybrid model with MTP, and the checkpoints with them
    merged.
    """
    base, folder = GOLDEN / "qwen3_5_dense", tmp_path_factory.mktemp("adapters")
    modules = module_names(base, parameters(config_from_folder(base), True))
    found = {"": base}
    for seed, name in enumerate(NAMES):
        adapter = write_adapter(folder / name, base, modules, seed=seed, rank=3 + seed)
        found |= {name: adapter, f"merged {name}": write_merged(folder / f"m{name}", base, adapter)}
    return found


@cache
def text_of(folder: Path, sampled: bool) -> list[int]:
    """The text of a whole checkpoint, by plain decoding."""
    how = SAMPLED if sampled else GREEDY
    return texts(engine_of(folder), [request(0, **how)])[0]


DRAFTERS = {
    "plain": (),
    "NEXTN": ("--speculative-algorithm", "NEXTN"),
    "NEXTN tree": (
        *("--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "2"),
        *("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "6"),
    ),
    "NGRAM": ("--speculative-algorithm", "NGRAM"),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_adapted_text_equals_merged_model(
    drafter: str, sampled: bool, folders: dict[str, Path]
) -> None:
    """Requests of both adapters and of the base model decode in one batch."""
    named = [f"{name}={folders[name]}" for name in NAMES]
    engine = engine_of(folders[""], ["--lora-paths", *named, *DRAFTERS[drafter]])
    how = SAMPLED if sampled else GREEDY
    got = texts(engine, [request(i, name, **how) for i, name in enumerate(("", *NAMES, ""))])
    base = text_of(folders[""], sampled)
    merged = [text_of(folders[f"merged {name}"], sampled) for name in NAMES]
    assert got == [base, *merged, base]
    assert base not in merged
    assert merged[0] != merged[1]


def test_adapted_mtp_accepts_tokens_of_merged_model(tmp_path: Path) -> None:
    """An adapter without tensors of the MTP layer has other accepted tokens."""
    base = tmp_path / "base"
    config = write_tiny(base, "qwen3_5", 3)
    modules = module_names(base, parameters(config, True))
    target = [name for name in modules if not name.startswith("mtp.")]
    whole = write_adapter(tmp_path / "whole", base, modules, alpha=6)
    part = write_adapter(tmp_path / "part", base, target, alpha=6)
    merged = write_merged(tmp_path / "merged", base, whole)

    def accepted(folder: Path, name: str, words: Sequence[str] = ()) -> float:
        engine = engine_of(folder, [*words, *DRAFTERS["NEXTN"]])
        texts(engine, [request(i, name, PROMPT[i:], max_tokens=48) for i in range(3)])
        return engine.metrics.snapshot()["spec_decode_num_accepted_tokens_total"]

    want = accepted(merged, "")
    words = ["--lora-paths", f"whole={whole}", f"part={part}"]
    assert accepted(base, "whole", words) == want > 0
    assert accepted(base, "part", words) != want


def test_base_rows_keep_bits_next_to_adapters(folders: dict[str, Path]) -> None:
    """Rows without an adapter have the bits of a server without adapters, whatever the others."""
    engine = engine_of(folders[""], ["--lora-paths", f"first={folders['first']}"])
    alone = engine_of(folders[""])
    for name in ("", "first"):
        rows = [request(0, logprobs=2), request(1, name)]
        got = drive(engine, rows)[0].logprobs
        want = drive(alone, [request(0, logprobs=2), request(1)])[0].logprobs
        assert len(got) == 16
        assert got == want


def test_prefix_cache_isolates_adapters(folders: dict[str, Path]) -> None:
    named = [f"{name}={folders[name]}" for name in NAMES]
    engine = engine_of(folders[""], ["--lora-paths", *named])
    found = []
    for number, name in enumerate(("first", "first", "second", "", "second", "")):
        each = request(number, name)
        drive(engine, [each])
        found.append(bool(each.cached_tokens))
    assert found == [False, True, False, False, True, True]
    for name in (*NAMES, ""):
        each = request(10, name)
        merged = f"merged {name}" if name else ""
        assert texts(engine, [each]) == [text_of(folders[merged], False)]
        assert each.cached_tokens


def test_preempted_request_keeps_adapter(folders: dict[str, Path]) -> None:
    named = [f"{name}={folders[name]}" for name in NAMES]
    engine = engine_of(folders[""], ["--lora-paths", *named], total=304)
    prompts = [tuple(range(i, i + 70)) for i in (5, 6, 7)]
    names = ("first", "second", "")
    rows = [request(i, names[i], prompts[i], max_tokens=40) for i in range(3)]
    got = texts(engine, rows)
    assert engine.scheduler.num_preemptions
    for i, name in enumerate(names):
        alone = engine_of(folders[f"merged {name}" if name else ""])
        assert texts(alone, [request(9, prompt=prompts[i], max_tokens=40)]) == [got[i]]


def test_unknown_adapter_raises(folders: dict[str, Path]) -> None:
    engine = engine_of(folders[""])
    with pytest.raises(ValueError, match="adapter 'third' is not loaded"):
        engine.add(request(0, "third"))


def test_metrics_count_requests_and_drafts_by_adapter(folders: dict[str, Path]) -> None:
    named = [f"{name}={folders[name]}" for name in NAMES]
    engine = engine_of(folders[""], ["--lora-paths", *named, *DRAFTERS["NEXTN"]])
    outcomes = drive(engine, [request(i, x) for i, x in enumerate(("first", "", "first"))])
    found = engine.metrics.snapshot()
    label = '{lora_name="first"}'
    assert found[f"lora_requests_total{label}"] == 2
    accepted = sum(sum(outcomes[i].accepted) for i in (0, 2))
    assert found[f"lora_spec_decode_num_accepted_tokens_total{label}"] == accepted
    drafted = found[f"lora_spec_decode_num_draft_tokens_total{label}"]
    assert accepted <= drafted < found["spec_decode_num_draft_tokens_total"]
    assert found["lora_adapters"] == 2
    assert found["lora_loads_total"] == 1
    assert 'lora_requests_total{lora_name="second"}' not in found


def test_adapter_metrics_have_bounded_labels() -> None:
    metrics = Metrics({}, 1)
    for i in range(MAX_ADAPTERS + 5):
        metrics.count_adapter(REQUESTS, AdapterVersion(f'a"{i}', "1"), 1)
    metrics.count_adapter(REQUESTS, AdapterVersion('a"0', "1"), 1)
    found = {name: n for name, n in metrics.snapshot().items() if name.startswith(REQUESTS)}
    assert len(found) == MAX_ADAPTERS + 1
    assert found[f'{REQUESTS}{{lora_name="other"}}'] == 5
    assert found[f'{REQUESTS}{{lora_name="a_0"}}'] == 2


def test_transferred_prefix_belongs_to_adapter(folders: dict[str, Path]) -> None:
    named = [f"{name}={folders[name]}" for name in NAMES]
    words = ["--lora-paths", *named, "--disaggregation-mode", "prefill"]
    source, sink = engine_of(folders[""], words), engine_of(folders[""], words)
    each = request(0, "first")
    drive(source, [each])
    assert source.transfer.begin_export(PROMPT, CacheNamespace(""), ()) is None
    job = source.transfer.begin_export(PROMPT, each.namespace, ())
    while source.busy:
        source.step()
    sink.transfer.begin_import(job.record, holds=False)
    while sink.busy:
        sink.step()
    hit = sink.transfer.match(PROMPT, each.namespace, ())
    assert hit > 0
    others = (CacheNamespace(""), each.namespace._replace(version="2"))
    assert [sink.transfer.match(PROMPT, x, ()) for x in others] == [0, 0]
    found = request(1, "first")
    assert texts(sink, [found]) == [text_of(folders["merged first"], False)]
    assert found.cached_tokens == hit
