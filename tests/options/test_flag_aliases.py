"""Flag aliases of SGLang and vLLM, former spellings, and reasons of unsupported flags."""

import re

import pytest

from shared.options.algorithms import KNOWN_ALGORITHMS
from shared.options.command_line import FLAGS, SHOWN, parse
from shared.options.flags import ConfigError, spelling, switches
from shared.options.unsupported_flags import UNSUPPORTED_FLAGS

PEERS = {
    "--max-model-len 100": "--context-length 100",
    "--max-num-seqs 3": "--max-running-requests 3",
    "--block-size 32": "--page-size 32",
    "--tensor-parallel-size 2": "--tp-size 2",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--enforce-eager": "--disable-cuda-graph",
    "--cors-allowed-origins *": "--allowed-origins *",
    "--kv-cache-dtype auto --port 1": "--port 1",
    "--kv-cache-dtype=auto --pp-size=1 --pp 1 --port=1": "--port 1",
    "--enable-metrics --port 1 --enable-prefix-caching": "--port 1",
    "--enable-deterministic-inference": "",
    "--distributed-executor-backend mp --scheduling-policy priority": (
        "--distributed-executor-backend mp"
    ),
    "--use-ray --tp 2": "--distributed-executor-backend ray --tp-size 2",
    "--dtype float": "--dtype float32",
    "--load-format safetensors": "--load-format auto",
    "--data-parallel-size 2 --data-parallel-backend mp": "--replicas 2 --replica-launcher local",
    "--dp-size 2": "--replicas 2",
    "--generation-config vllm": "--sampling-defaults openai",
    "--guided-decoding-backend guidance": "--grammar-backend llguidance",
    "--tool-call-parser qwen25": "--tool-call-parser hermes",
    "--tool-call-parser llama3_json": "--tool-call-parser llama3",
    "--reasoning-parser deepseek_r1": "--reasoning-parser deepseek-r1",
    "--speculative-algorithm mtp --speculative-use-rejection-sampling": (
        "--speculative-algorithm NEXTN --speculative-accept-rule rejection"
    ),
    "--speculative-algorithm mtp --speculative-simulate-acc-len 2": (
        "--speculative-algorithm NEXTN --speculative-simulate-accept-length 2"
    ),
}

FORMER = {
    "--max-picture-tokens 64": "--max-image-tokens 64",
    "--picture-pool-tokens 64": "--mm-encoder-cache-tokens 64",
    "--launcher local": "--distributed-executor-backend mp",
    "--dp 2": "--replicas 2",
    "--overlap 2": "--overlap-depth 2",
    "--shadow-check 0.5": "--shadow-verify-rate 0.5",
    "--trace-requests": "--trace-all-requests",
    "--insecure": "--allow-unauthenticated",
    "--drain-timeout 3": "--graceful-shutdown-timeout 3",
    "--speculative-algorithm NEXTN --accept-rule match": (
        "--speculative-algorithm NEXTN --speculative-accept-rule exact"
    ),
    "--speculative-algorithm NEXTN --block-verification": (
        "--speculative-algorithm NEXTN --speculative-use-block-verification"
    ),
    "--speculative-algorithm NGRAM --speculative-ngram-index table": (
        "--speculative-algorithm NGRAM --speculative-ngram-backend device"
    ),
    "--speculative-algorithm NGRAM --speculative-ngram-index trie": (
        "--speculative-algorithm NGRAM --speculative-ngram-backend host"
    ),
    "--speculative-algorithm NEXTN+NGRAM --speculative-ngram-draft-tokens 5": (
        "--speculative-algorithm NEXTN+NGRAM --speculative-ngram-num-draft-tokens 5"
    ),
    "--speculative-algorithm NEXTN --speculative-draft-layer-ids inputs": (
        "--speculative-algorithm NEXTN --speculative-aux-layer-convention inputs"
    ),
}


@pytest.mark.parametrize("line", FORMER)
def test_former_flag_equals_new_spelling(line):
    assert parse(line.split()) == parse(FORMER[line].split())


def test_quantization_w8a8_fp8_sets_fp8_activations():
    model = parse(["--quantization", "w8a8_fp8"]).model
    assert model == parse(["--quantization", "fp8", "--fp8-activations"]).model


def test_former_flags_are_tested_and_hidden():
    former = {name for item in FLAGS.values() for name in item.metadata.get("old_names", ())}
    assert former == {word for line in FORMER for word in line.split()} & former
    assert not former & SHOWN


@pytest.mark.parametrize("name", sorted({n for item in FLAGS.values() for n in switches(item)}))
def test_switch_conflicts_with_other_flag_value(name):
    item = FLAGS[name]
    (other, *_) = [x for x in item.metadata["choices"] if x != switches(item)[name]]
    with pytest.raises(ConfigError, match="given twice"):
        parse([name, spelling(item.name), other])


@pytest.mark.parametrize("line", PEERS)
def test_peer_flag_equals_own_flag(line):
    assert parse(line.split()) == parse(PEERS[line].split())


SERVED = {
    **{name.lower(): "--speculative-algorithm" for name in KNOWN_ALGORITHMS},
    **{"fp8": "--quantization", "quanti": "--quantization", "ray": "--tp-size"},
    **{"host": "--distributed-executor-backend", "gpus": "--tp-size", "tensor": "--tp-size"},
    **{"rejection": "--speculative-accept-rule", "metrics": "--admin-port"},
    **{"grammar": "--grammar-backend", "image": "--max-image-tokens", "tool": "--tool-call-parser"},
    **{"reasoning": "--reasoning-parser", "trace": "--otlp-traces-endpoint"},
}
"""Words for supported features, with a flag of each."""


def test_unsupported_reason_denies_no_served_feature():
    """A reason that names a supported feature must name the flag that enables it."""
    assert {*SERVED.values()} <= FLAGS.keys()
    for name, reason in UNSUPPORTED_FLAGS.items():
        served = [word for word in SERVED if re.search(rf"\b{re.escape(word)}", reason.lower())]
        denied = re.search(r"\b(not|no|never|cannot|unsupported)\b", reason)
        if served and denied:
            assert any(flag in reason for flag in FLAGS), (name, served, reason)
