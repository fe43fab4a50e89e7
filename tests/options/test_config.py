"""Command-line flags: parsed values, defaults, invalid values and unsupported flags."""

import dataclasses
import re

import pytest

from shared.options.command_line import FLAGS, parse
from shared.options.flags import ConfigError, spelling, spellings, switches
from shared.options.options import PARTS
from shared.options.rule_context import RuleContext
from shared.options.rules import refusals
from shared.options.unsupported_flags import ALWAYS, NEUTRAL, UNSUPPORTED_FLAGS
from tests.support.tiny_models import tiny_model

NEXTN = ["--speculative-algorithm", "NEXTN"]
MODEL, WEIGHTS = tiny_model("qwen3_5", 0)

REFUSED = {
    "--pp-size 2": "--pp-size is not supported",
    "--pp=2": "--pp is not supported",
    "--tp-size 0": "--tp-size must be 1 to 64, got 0",
    "--distributed-executor-backend slurm": (
        "--distributed-executor-backend must be one of mp, ray, got slurm"
    ),
    "--mem-fraction-static 1.5": "--mem-fraction-static",
    "--mem-fraction-static most": "--mem-fraction-static must be a number, got most",
    "--shadow-verify-rate 1.5": "--shadow-verify-rate must be 0.0 to 1.0, got 1.5",
    "--shadow-verify-rate nan": "--shadow-verify-rate must be 0.0 to 1.0, got nan",
    "--reasoning-parser no": "--reasoning-parser must be one of auto, none, qwen3, deepseek-r1",
    "--tool-call-parser no": "--tool-call-parser must be one of auto, none, hermes, qwen3_coder,",
    "--speculative-ngram-min-bfs-breadth 1": (
        "--speculative-ngram-min-bfs-breadth requires an n-gram drafter"
    ),
    "--speculative-algo NGRAM --speculative-ngram-min-bfs-breadth 11": (
        "--speculative-ngram-min-bfs-breadth 11 must not exceed --speculative-ngram-max-bfs-breadth"
    ),
    "--speculative-algo NGRAM --speculative-ngram-external-sam-budget 12": (
        "less than --speculative-num-draft-tokens 12; give at most 11"
    ),
    "--speculative-algo NGRAM --speculative-ngram-external-corpus-path x": (
        "set --speculative-ngram-external-sam-budget"
    ),
    "--speculative-algo NGRAM --speculative-ngram-match-type DFS": (
        "--speculative-ngram-match-type must be one of BFS, PROB"
    ),
    "--speculative-algo NGRAM --speculative-num-steps 3": (
        "not supported with --speculative-algorithm NGRAM"
    ),
    "--pagesize 16": "did you mean --page-size?",
    "--page 16": "unknown flag --page",  # no abbreviations
    "stray": "stray is not a flag or the value of one",
    "--port": "--port requires a value",
    "--port x": "--port must be an integer, got x",
    "--port 1.5": "--port must be an integer",
    "--port -1": "--port must be 0 to 65535, got -1",
    "--port 65536": "--port must be 0 to 65535",
    "--port 1 --port 2": "--port is given twice",
    "--host=": "--host is empty",
    "--admin-host there": "--admin-host requires --admin-port; add it",
    "--admin-port 65536": "--admin-port must be 0 to 65535",
    "--graceful-shutdown-timeout -1": "--graceful-shutdown-timeout must be 0",
    "--log-format xml": "--log-format must be one of text, json",
    "--log-level loud": "--log-level must be one of debug, info, warning, error",
    "--otlp-traces-endpoint here:4317": "--otlp-traces-endpoint must begin with http:// or https://",
    "--page-size 0": "--page-size must be 1 to 1024",
    "--page-size 24": "--page-size must be a power of two",
    "--max-total-tokens 0": "--max-total-tokens must be 1",
    "--max-running-requests 0": "--max-running-requests must be 1",
    "--chunked-prefill-size 100": "--chunked-prefill-size must be a multiple of 64",
    "--chunked-prefill-size -1": "--chunked-prefill-size must be 64",
    "--context-length 1": "--context-length must be 2",
    "--dtype float16": "--dtype must be one of auto, float32, bfloat16",
    "--overlap-depth 3": "--overlap-depth must be 0 to 2",
    "--overlap-depth 1 --disable-overlap-schedule": (
        "--disable-overlap-schedule contradicts --overlap-depth 1"
    ),
    "--speculative-num-steps 3": "--speculative-num-steps requires a drafter",
    "--speculative-draft-model-path x": "--speculative-draft-model-path requires a drafter",
    "--speculative-algo EAGLE3": "give its folder as --speculative-draft-model-path",
    "--speculative-algo EAGLE": "--speculative-algorithm EAGLE requires a draft head",
    "--speculative-algorithm nope": "--speculative-algorithm must be one of NEXTN",
    "--speculative-algo NEXTN --speculative-algorithm EAGLE": "is given twice",
    "--speculative-algo NEXTN --speculative-draft-model-path x": "--speculative-draft-model-path",
    "--speculative-algo NEXTN --speculative-num-steps 0": "--speculative-num-steps must be 1 to 16",
    "--speculative-algo NEXTN --speculative-num-steps 3 --speculative-num-draft-tokens 6": (
        "--speculative-num-draft-tokens 6 must be --speculative-num-steps + 1 = 4"
    ),
    "--speculative-algo NEXTN --speculative-eagle-topk 2 --speculative-num-draft-tokens 64": (
        "--speculative-num-draft-tokens must be 4 to 11"
    ),
    "--speculative-algo NEXTN --speculative-num-steps 7 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 2": "--speculative-num-draft-tokens must be 8 to 64 with",
    "--speculative-algo NEXTN --speculative-num-draft-tokens 21": (
        "--speculative-num-draft-tokens 21 must be --speculative-num-steps + 1 = 17"
    ),
    "--speculative-algo NEXTN --speculative-eagle-topk 8 --speculative-num-draft-tokens 65": (
        "--speculative-num-draft-tokens must be 2 to 64"
    ),
    "--speculative-algo NEXTN --speculative-eagle-topk 4": ("set --speculative-num-draft-tokens"),
    "--speculative-adaptive": "--speculative-adaptive requires a drafter",
    "--speculative-algo NEXTN --speculative-adaptive-config x": (
        "--speculative-adaptive-config requires --speculative-adaptive; add it"
    ),
    "--speculative-algo NEXTN --speculative-adaptive --speculative-eagle-topk 1": (
        "fix one draft shape, and --speculative-adaptive chooses among several"
    ),
    "--speculative-algo NEXTN --speculative-adaptive --speculative-accept-rule rejection": (
        "give --speculative-accept-rule exact, or remove --speculative-adaptive"
    ),
    "--speculative-algo NGRAM --speculative-num-draft-tokens 3 --speculative-adaptive "
    "--speculative-simulate-accept-length 4": ("more draft levels than the 2 that are drafted"),
    "--speculative-algo NGRAM --speculative-adaptive --speculative-simulate-accept-length 14": (
        "more draft levels than the 11 that are drafted"
    ),
    "--speculative-algo NAIVE_EAGLE --speculative-num-steps 3": (
        "not supported with --speculative-algorithm NAIVE_EAGLE"
    ),
    "--speculative-algo NAIVE_EAGLE --speculative-eagle-topk 2": (
        "not supported with --speculative-algorithm NAIVE_EAGLE"
    ),
    "--speculative-algo NAIVE_EAGLE --speculative-num-draft-tokens 4": (
        "not supported with --speculative-algorithm NAIVE_EAGLE"
    ),
}


def faults(line: list[str]) -> list[str]:
    """Returns the error of the flag parser, or else the violated rules of a complete model."""
    try:
        return refusals(setup(line))
    except ConfigError as error:
        return [str(error)]


@pytest.mark.parametrize("line", REFUSED)
def test_parse_rejects_invalid_command_line(line):
    (sentence,) = faults(line.split())
    assert REFUSED[line] in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("name", UNSUPPORTED_FLAGS)
def test_unsupported_flag_raises_with_reason(name):
    with pytest.raises(ConfigError, match="is not supported: ") as refused:
        parse([name, "some"])
    assert str(refused.value).startswith(name)


def test_unsupported_flag_reasons_name_existing_flags():
    """A reason that names a removed flag would lead the user to another error."""
    for name, reason in UNSUPPORTED_FLAGS.items():
        for named in re.findall(r"--[a-z-]+", reason):
            assert named in FLAGS, (name, reason)


def test_unsupported_flag_reasons_deny_no_supported_dtype():
    """FP8 checkpoints and bfloat16 are supported and deterministic."""
    assert not [reason for reason in UNSUPPORTED_FLAGS.values() if "float32" in reason]
    assert parse(["--quantization", "fp8", "--dtype", "bfloat16"]).model.quantization == "fp8"


@pytest.mark.parametrize(
    "line",
    ["--kv-cache-dtype fp8", "--kv-cache-dtype=fp8", "--pp-size 2", "--kv-cache-dtype"]
    + ["--enable-metrics=1", "--nnodes 2", "--pp-size"],
)
def test_neutral_flag_rejects_effective_value(line):
    with pytest.raises(
        ConfigError, match=f"(^|unknown flag ){line.split()[0].split('=')[0]}(;| is n)"
    ):
        parse(line.split())


def test_known_and_unsupported_flags_are_disjoint():
    fields = {f for part in PARTS.values() for f in dataclasses.fields(part)}
    known = {name for f in fields for name in (*spellings(f), *switches(f))}
    assert not known & (UNSUPPORTED_FLAGS.keys() | ALWAYS)
    assert UNSUPPORTED_FLAGS.keys() >= NEUTRAL.keys()


def test_parse_ngram_flags_set_their_fields():
    given = {
        "speculative_ngram_min_bfs_breadth": 2,
        "speculative_ngram_max_bfs_breadth": 3,
        "speculative_ngram_match_type": "PROB",
        "speculative_ngram_max_trie_depth": 9,
        "speculative_ngram_capacity": 2048,
        "speculative_ngram_scope": "request",
        "speculative_ngram_external_corpus_path": "there",
        "speculative_ngram_external_sam_budget": 4,
        "speculative_ngram_external_corpus_max_tokens": 77,
    }
    line = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    line += [word for name, v in given.items() for word in (spelling(name), str(v))]
    options = parse(line)
    assert vars(options.ngram) == given | {"speculative_ngram_num_draft_tokens": 12}
    both = ["--speculative-algorithm", "NEXTN+NGRAM", "--speculative-ngram-num-draft-tokens", "5"]
    assert parse(both).ngram.num_copies == 5
    shape = options.speculative.settled(drafts_trees=True, block=None)
    assert (shape.num_steps, shape.topk, shape.num_draft_tokens) == (5, 1, 6)


def test_parse_flags_set_their_fields():
    given = {
        "model_path": "here",
        "revision": "v1",
        "download_dir": "cache",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "quantization": "fp8",
        "context_length": 100,
        "lora_paths": "a=one,b=two",
        "max_loras_per_batch": 1,
        "max_lora_rank": 32,
        "lora_target_modules": "all",
        "host": "::1",
        "port": 0,
        "allowed_hosts": "it.example,other.example",
        "allowed_origins": "https://chat.example",
        "served_model_name": "it",
        "watchdog_timeout": 30,
        "graceful_shutdown_timeout": 5,
        "admin_host": "127.0.0.2",
        "admin_port": 0,
        "admin_api_key": "secret",
        "log_format": "json",
        "log_level": "debug",
        "otlp_traces_endpoint": "http://collector:4318/v1/traces",
        "max_queued_requests": 0,
        "sampling_defaults": "openai",
        "page_size": 32,
        "max_total_tokens": 512,
        "max_running_requests": 3,
        "chunked_prefill_size": 128,
        "api_key": "word",
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
        "chat_template": "mine.jinja",
        "mem_fraction_static": 0.75,
        "shadow_verify_rate": 0.25,
        "mamba_track_interval": 128,
        "grammar_backend": "llguidance",
        "max_prompt_logprobs": 4,
        "overlap_depth": 2,
        "speculative_algorithm": "NEXTN",
        **{"speculative_num_steps": 5, "speculative_eagle_topk": 1},
        "speculative_num_draft_tokens": 6,
        "speculative_accept_rule": "rejection",
        "speculative_adaptive_config": "shapes.json",
        "speculative_adaptive_trace": "steps.jsonl",
        **{"tp_size": 2, "distributed_executor_backend": "ray"},
        **{"replicas": 3, "replica_launcher": "ray", "servers": "http://a:1,http://b:2"},
        **{"routing_policy": "least_load", "health_check_interval": 2, "health_check_timeout": 4},
        **{"max_image_tokens": 512, "mm_encoder_cache_tokens": 4096},
        "speculative_token_map": "map.json",
        "speculative_ngram_backend": "device",
        "disaggregation_mode": "peer",
        "prefill_servers": "http://10.0.0.2:8000",
        "disaggregation_transfer_backend": "tcp",
        "disaggregation_transfer_port": 0,
        "disaggregation_secret_file": "secret",
        **{"disaggregation_buffer_mib": 64, "disaggregation_ticket_timeout": 5},
        **{"remote_prefill_min_tokens": 64, "remote_prefill_timeout": 5},
    }
    options = parse([word for name, v in given.items() for word in (spelling(name), str(v))])
    parts = PARTS.keys() - {"ngram"}
    found = {k: v for part in parts for k, v in vars(getattr(options, part)).items()}
    switches = {name for name, value in found.items() if value is False}
    none = (
        "draft_model_path",
        "draft_model_revision",
        "draft_window_size",
        "aux_layer_convention",
        "simulate_accept_length",
    )
    absent = {f"speculative_{name}": None for name in none} | dict.fromkeys(switches, False)
    assert found == given | absent


@pytest.mark.parametrize(
    ("line", "depth"),
    [("", 1), ("--overlap-depth 0", 0), ("--overlap-depth 2", 2), ("--disable-overlap-schedule", 0)]
    + [("--overlap-depth 0 --disable-overlap-schedule", 0)],
)
def test_disable_overlap_schedule_equals_overlap_depth_0(line, depth):
    assert parse(line.split()).engine.steps_in_flight == depth


HEAD = ["--speculative-draft-model-path", "there"]
EAGLE = ["--speculative-algorithm", "EAGLE", *HEAD]
EAGLE3 = ["--speculative-algorithm", "EAGLE3", *HEAD]


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ([], (3, 1, 4)),
        (["--speculative-num-steps", "5"], (5, 1, 6)),
        (["--speculative-num-draft-tokens", "2"], (1, 1, 2)),
        (["--speculative-eagle-topk", "8", "--speculative-num-draft-tokens", "64"], (3, 8, 64)),
    ],
)
def test_draft_chain_shape_from_steps_or_nodes(flags, shape):
    draft = parse(NEXTN + flags).speculative
    assert (draft.num_steps, draft.topk, draft.num_draft_tokens) == shape


@pytest.mark.parametrize(
    ("line", "drafts_trees", "shape"),
    [
        (EAGLE, True, (5, 4, 8)),
        (EAGLE, False, (3, 1, 4)),
        ([*EAGLE, "--speculative-num-steps", "2"], True, (2, 1, 3)),
        (NEXTN, False, (3, 1, 4)),
        (["--speculative-algorithm", "NAIVE_EAGLE"], False, (1, 1, 2)),
        (["--speculative-algorithm", "NAIVE_EAGLE", *HEAD], True, (1, 1, 2)),
    ],
)
def test_settled_defaults_by_algorithm_and_target(line, drafts_trees, shape):
    draft = parse(line).speculative.settled(drafts_trees, None)
    given = (
        draft.speculative_num_steps,
        draft.speculative_eagle_topk,
        draft.speculative_num_draft_tokens,
    )
    assert given == (draft.num_steps, draft.topk, draft.num_draft_tokens) == shape


@pytest.mark.parametrize(
    ("line", "drafts", "with_mtp"),
    [
        ([], False, False),
        (NEXTN, True, True),
        (EAGLE, True, False),
        (["--speculative-algorithm", "NAIVE_EAGLE"], True, True),
        (["--speculative-algorithm", "NAIVE_EAGLE", *HEAD], True, False),
    ],
)
def test_with_mtp_by_algorithm_and_draft_head(line, drafts, with_mtp):
    draft = parse(line).speculative
    assert (draft.drafts, draft.with_mtp) == (drafts, with_mtp)


def setup(
    line: list[str], model=MODEL, has_mtp: bool = True, head_kind: str | None = None
) -> RuleContext:
    return RuleContext(options=parse(line), model=model, has_mtp=has_mtp, head_kind=head_kind)


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_draft_head_kind_must_match_unless_naive_eagle(kind):
    other = "EAGLE" if kind == "EAGLE3" else "EAGLE3"
    line = ["--speculative-algorithm", kind, *HEAD]
    assert refusals(setup(line, head_kind=kind)) == []
    (found,) = refusals(setup(line, head_kind=other))
    assert f"--speculative-algorithm {kind} does not fit" in found
    assert f"give --speculative-algorithm {other}" in found
    naive = ["--speculative-algorithm", "NAIVE_EAGLE", *HEAD]
    assert refusals(setup(naive, has_mtp=False, head_kind=kind)) == []


def test_naive_eagle_without_head_requires_mtp_layer():
    line = ["--speculative-algorithm", "NAIVE_EAGLE"]
    assert refusals(setup(line)) == []
    assert "NAIVE_EAGLE" in refusals(setup(line, has_mtp=False))[0]


def test_nextn_requires_mtp_tensors():
    plain, _ = tiny_model("qwen3", 0, with_mtp=False)
    assert refusals(setup(NEXTN)) == []
    assert "NEXTN" in refusals(setup(NEXTN, has_mtp=False))[0]
    assert "qwen3 checkpoint has none" in refusals(setup(NEXTN, model=plain, has_mtp=False))[0]


def test_refusals_report_all_violations():
    found = refusals(setup([*NEXTN, "--context-length", "999999"], has_mtp=False))
    flags = ("--speculative-algorithm", "--context-length 999999")
    for flag, sentence in zip(flags, found, strict=True):
        assert flag in sentence


NODES_6 = ["--speculative-num-draft-tokens", "6"]
SIMULATE = "--speculative-simulate-accept-length"


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("1", (0.0,)),
        ("3", (1.0, 1.0)),
        ("2.5", (1.0, 0.5)),
        ("1.25", (0.25,)),
        ("0.9,0.5,0", (0.9, 0.5, 0.0)),
    ],
)
def test_simulate_accept_length_sets_accept_rates(text, rates):
    assert parse([*NEXTN, SIMULATE, text]).speculative.accept_rates == rates
    assert parse(NEXTN).speculative.accept_rates is None


@pytest.mark.parametrize("text", ["0.5", "nan", "inf", "65", "0.5,1.1", "0.5,", "-1,0.5", "two"])
def test_simulate_accept_length_rejects_invalid_value(text):
    with pytest.raises(
        ConfigError, match=f"{SIMULATE} must be a number of tokens from 1 to 64, or"
    ):
        parse([*NEXTN, f"{SIMULATE}={text}"])


def test_simulate_accept_length_requires_drafter():
    with pytest.raises(ConfigError, match=f"{SIMULATE} requires a drafter"):
        parse([SIMULATE, "2"])
