"""Rules of unsupported combinations: each example is rejected, all other combinations are served.

Every drafter runs once with every accept rule, draft shape, page size, overlap depth and request
field. The runs use the real startup code and the engine, on the reference backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from docs.make import compatibility
from shared.boundary.backend import Backend
from shared.drafts.kinds import ASSISTANT, BLOCK_KINDS, HEADS, KINDS, NGRAM, STANDALONE
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.options import capabilities
from shared.options.algorithms import (
    ALGORITHMS,
    JOINED_ALGORITHMS,
    WITH_COPIES,
)
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.options.rule_context import RuleContext
from shared.options.rules import RULES, refusals
from shared.process import engines
from shared.process.device import Device
from shared.process.start import prepare
from tests.support import serve_reference
from tests.support.http_fixtures import save_tokenizer
from tests.support.run_engine import Outcome, drive
from tests.support.tiny_assistants import write_tiny_assistant
from tests.support.tiny_heads import (
    BLOCK_SIZE,
    write_tiny_block,
    write_tiny_head,
    write_tiny_pair,
    write_tiny_spark,
)
from tests.support.tiny_models import tiny_model, write_tiny

MERGED = [
    "NEXTN+NGRAM",
    *(pytest.param(n, marks=pytest.mark.matrix) for n in JOINED_ALGORITHMS if n != "NEXTN+NGRAM"),
]
FAMILY = "qwen3_5"

FEW_SHAPES = ("NEXTN", "EAGLE", STANDALONE.name)
"""Drafters that measure two shapes in an adaptive start; EAGLE3 measures the default ones."""


@dataclass(frozen=True)
class DraftFolders:
    """Folders of a model and of a draft head of each kind, and engines made from them."""

    folder: Path

    def start(self, drafter: str, flags: tuple[str, ...]) -> list[str]:
        """Returns the command line of a drafter's minimal start with more flags."""
        model = "gemma4" if drafter.removesuffix(WITH_COPIES) == ASSISTANT.name else "model"
        line = ["--model-path", str(self.folder / model), "--max-running-requests", "3"]
        line += ["--context-length", "128", "--chunked-prefill-size", "64"]
        if drafter != "none":
            line += ["--speculative-algorithm", drafter]
        own = drafter.removesuffix(WITH_COPIES)
        if drafter != "none" and KINDS[own].needs_folder:
            line += ["--speculative-draft-model-path", str(self.folder / own)]
        if "--speculative-adaptive" in flags and drafter in FEW_SHAPES:
            flags = (*flags, "--speculative-adaptive-config", str(self.folder / "shapes.json"))
        given = {flag for flag in flags if flag.startswith("--")}
        pairs = zip(line[::2], line[1::2], strict=True)
        return [word for pair in pairs if pair[0] not in given for word in pair] + list(flags)

    def serve(self, line: list[str]) -> dict[int, Outcome]:
        """Returns the outcomes of `requests` from the engine of a command line."""
        engine, backend = self._started(line)
        try:
            return drive(engine, requests(backend.capacity.vocab))
        finally:
            engine.close()

    def parity(self, line: list[str]) -> dict[str, float]:
        """Returns the shadow verification metrics after `requests`."""
        engine, backend = self._started(line)
        checked = engines.with_shadow_verify(engine, backend, parse(line).engine.shadow_verify_rate)
        try:
            for request in requests(backend.capacity.vocab):
                checked.add(request)
            while checked.busy:
                checked.step()
            found = checked.metrics.snapshot()
        finally:
            checked.close()
        head = "shadow_verify_"
        return {name.removeprefix(head): n for name, n in found.items() if name.startswith(head)}

    def _started(self, line: list[str]) -> tuple[Engine, Backend]:
        device = Device("cpu", "CPU", 1 << 31)
        platform = replace(serve_reference.PLATFORM, find_device=lambda: device)
        start = prepare(parse(line), platform)
        backend = start.load(platform, lambda num_bytes: None)
        backend.prepare(backend.capacity.programs, lambda program: None)
        return engines.make_engine(backend, start.memory), backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> DraftFolders:
    folder = tmp_path_factory.mktemp("drafters")
    (folder / "shapes.json").write_text('{"candidate_steps": [1, 3]}')
    target, weights = tiny_model(FAMILY, 0)
    write_tiny(folder / "model", FAMILY, 0)
    for kind in ("EAGLE", "EAGLE3"):
        write_tiny_head(folder / kind, target, weights, kind, 1)
    write_tiny_block(folder / "DFLASH", target, 1)
    write_tiny_spark(folder / "DSPARK", target, weights, 1)
    write_tiny_pair(folder / "DFLASH2", target, 1)
    write_tiny(folder / STANDALONE.name, FAMILY, 2, with_mtp=False)
    write_tiny(folder / "gemma4", "gemma4", 0)
    write_tiny_assistant(folder / ASSISTANT.name, *tiny_model("gemma4", 0), 1)
    for name in ("model", "gemma4", STANDALONE.name):
        save_tokenizer(folder / name)
    return DraftFolders(folder)


FIELDS: dict = {
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "min_tokens": 4,
    "logprobs": 2,
    "seed32": 5,
}


def requests(vocab: int) -> list[Request]:
    """Returns a greedy request, one with every sampling field, and one without drafts."""
    everything = FIELDS | {"stop_token_ids": (3, 9), "logit_bias": {7: 1.5, vocab - 1: -2.0}}
    asked = [{"temperature": 0.0}, everything, {"temperature": 0.8, "max_draft_tokens": 0}]
    return [
        Request(
            request_id=number,
            prompt=(5, 9, 5, 9, 11, 5, 9),
            sampling=SamplingParams(max_tokens=6, **how),
        )
        for number, how in enumerate(asked)
    ]


def words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


TREE = words(
    "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
)
SETTINGS = {
    "chain": words("--page-size 16"),
    "tree": (*words("--page-size 1 --overlap-depth 2"), *TREE),
    "grammar": words("--page-size 16 --overlap-depth 2 --grammar-backend llguidance"),
    "rejection": words("--page-size 64 --overlap-depth 0 --speculative-accept-rule rejection"),
    "adaptive": words("--page-size 8 --overlap-depth 1 --speculative-adaptive"),
    "block": words(
        "--page-size 4 --speculative-accept-rule rejection --speculative-use-block-verification"
    ),
}


@pytest.fixture(scope="module")
def plain_outputs(folders: DraftFolders) -> Callable[[str], dict[int, Outcome]]:
    """Returns the outcomes of plain decoding by the path of a model."""
    return cache(lambda model: folders.serve(folders.start("none", ("--model-path", model))))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", [*ALGORITHMS, *MERGED])
def test_allowed_combinations_serve_expected_tokens(
    drafter: str,
    setting: str,
    folders: DraftFolders,
    plain_outputs: Callable[[str], dict[int, Outcome]],
) -> None:
    line = folders.start(drafter, SETTINGS[setting])
    if blocked(drafter, line):
        with pytest.raises(ConfigError):
            folders.serve(line)
        return
    served, plain = folders.serve(line), plain_outputs(line[1 + line.index("--model-path")])
    # Rejection sampling may change sampled tokens, but not greedy or undrafted ones.
    is_text_kept = setting in ("chain", "tree", "adaptive", "grammar") or drafter == NGRAM.name
    same = plain.keys() if is_text_kept else (0, 2)
    for number in plain:
        assert served[number].finish_reason is plain[number].finish_reason
        assert number not in same or served[number].tokens == plain[number].tokens


@pytest.mark.parametrize("drafter", ["none", *ALGORITHMS, *MERGED])
def test_shadow_verify_matches_for_all_drafters(drafter: str, folders: DraftFolders) -> None:
    parity = folders.parity(folders.start(drafter, ("--shadow-verify-rate", "1")))
    assert parity['requests_total{result="match"}'] == 3
    assert parity['requests_total{result="mismatch"}'] == 0
    assert parity['requests_total{result="dropped"}'] == 0


def blocked(drafter: str, line: list[str]) -> list[str]:
    """Returns the violated rules of a start with valid files."""
    model, _ = tiny_model(FAMILY, 0)
    return refusals(
        RuleContext(options=parse(line), model=model, has_mtp=True, **drafting(drafter))
    )


def drafting(drafter: str) -> dict:
    """Returns the fields of a `RuleContext` that a drafter's files determine."""
    own = drafter.removesuffix(WITH_COPIES)
    head_kind = own if own in HEADS else None
    nodes = BLOCK_SIZE if head_kind in BLOCK_KINDS else None
    return {"head_kind": head_kind, "block": nodes}


def test_accept_rules_supported_by_all_drafters(folders: DraftFolders) -> None:
    for drafter in ALGORITHMS:
        for setting in ("chain", "adaptive", "rejection", "block"):
            assert not blocked(drafter, folders.start(drafter, SETTINGS[setting]))


EXAMPLES = [rule for rule in RULES if rule.example is not None]


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.reason[:50])
def test_rule_example_is_rejected_with_its_reason(rule, folders: DraftFolders) -> None:
    example = rule.example
    family = example.model_type or FAMILY
    model, _ = tiny_model(family, 0, with_mtp=example.model_type is None)

    def setup(flags: tuple[str, ...]) -> RuleContext:
        options = parse(folders.start(example.drafter, flags))
        has_mtp = example.model_type is None
        return RuleContext(
            options=options, model=model, has_mtp=has_mtp, **drafting(example.drafter)
        )

    refused = setup(example.flags)
    assert rule.sentence(refused.words()) in refusals(refused)
    if example.model_type is None:
        assert refusals(setup(())) == []
        with pytest.raises(ConfigError) as error:  # also by the startup code, which reads the files
            folders.serve(folders.start(example.drafter, example.flags))
        assert rule.sentence(refused.words()) in str(error.value).splitlines()


def test_startup_error_lists_all_violated_rules(folders: DraftFolders) -> None:
    flags = (
        "--speculative-accept-rule",
        "rejection",
        *TREE,
        "--overlap-depth",
        "2",
        "--disable-overlap-schedule",
    )
    with pytest.raises(ConfigError) as refused:
        folders.serve(folders.start("NEXTN", flags))
    messages = str(refused.value).splitlines()
    assert len(messages) == 2
    assert any(
        "--speculative-accept-rule rejection supports draft chains" in sentence
        for sentence in messages
    )
    assert any("--disable-overlap-schedule" in sentence for sentence in messages)


def test_compatibility_page_equals_generator() -> None:
    page = compatibility.PAGE.read_text(encoding="utf-8")
    assert page == compatibility.page(), "run python -m docs.make.compatibility"


def test_compatibility_matrix_has_methods_and_features_once() -> None:
    head, *rows = compatibility.matrix()
    methods = [name for column in head[1:] for name in column.split(", ")]
    assert sorted(methods) == sorted(["plain", *ALGORITHMS, *JOINED_ALGORITHMS])
    assert [row[0] for row in rows] == [feature.name for feature in compatibility.FEATURES]


@pytest.mark.parametrize(
    ("method", "feature", "reason"),
    [
        ("NEXTN", "rejection sampling", None),
        ("NGRAM", "n-gram index on the device", None),
        ("NEXTN+NGRAM", "rejection sampling", "--speculative-accept-rule rejection"),
        ("DFLASH", "reduced draft vocabulary", "--speculative-token-map"),
        ("NAIVE_EAGLE", "draft trees of the drafter", "NAIVE_EAGLE"),
        ("NEXTN", "model without MTP layer", "MTP layer"),
    ],
)
def test_compatibility_cell_has_rule_number(method: str, feature: str, reason: str | None) -> None:
    (row,) = [each for each in compatibility.FEATURES if each.name == feature]
    found = compatibility.cell(method, row)
    if reason is None:
        assert found == "yes"
        return
    number = int(found.removeprefix("no (").removesuffix(")"))
    assert reason in RULES[number - 1].reason


def test_compatibility_cells_without_rules_are_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "RULES", ())
    cells = {cell for row in compatibility.matrix()[1:] for cell in row[1:]}
    assert cells == {"yes", compatibility.NOT_APPLICABLE}


def test_request_features_name_request_fields() -> None:
    served = {row[0]: row[1] for row in compatibility.request_rows()[1:]}
    assert "`tools`" in served["tool calls"]
    assert served["bad words"] == served["beam search"] == ""


def test_capabilities_list_known_drafters() -> None:
    answer = capabilities.to_json(is_strict=False)
    assert answer["drafters"] == [*ALGORITHMS, *JOINED_ALGORITHMS]
    for entry in answer["unsupported"]:
        assert entry["reason"]
        assert entry["hint"]
        assert entry["example"]["drafter"] in answer["drafters"]
        assert {"flags", "request"} <= entry["example"].keys()


def test_capabilities_strict_moves_ignored_to_unsupported() -> None:
    lenient, strict = (capabilities.to_json(is_strict=strict) for strict in (False, True))
    names = {entry["field"] for entry in lenient["ignored"]}
    assert {"store", "metadata", "reasoning_effort", "tools[].cache_control"} <= names
    assert strict["ignored"] == []
    assert len(strict["unsupported"]) == len(lenient["unsupported"]) + len(lenient["ignored"])
