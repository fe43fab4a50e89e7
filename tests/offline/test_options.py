"""Options of `LLM`: checks of names and types, and errors with Python spellings."""

from pathlib import Path

import numpy as np
import pytest

from shared.offline.options import OF_A_SERVER, in_python, read_options
from shared.options.flags import ConfigError
from shared.options.options import PARTS
from shared.options.unsupported_flags import UNSUPPORTED_FLAGS

FIELDS = {
    item.name: item
    for part in PARTS.values()
    for item in part.__dataclass_fields__.values()
    if item.name not in OF_A_SERVER
}
UNSUPPORTED = [flag.removeprefix("--").replace("-", "_") for flag in UNSUPPORTED_FLAGS]


def error_of(**options) -> str:
    with pytest.raises(ConfigError) as caught:
        read_options(options)
    sentence = str(caught.value)
    assert "--" not in sentence
    assert "flag" not in sentence.replace("docs/server_flags.md", "")
    return sentence


@pytest.mark.parametrize("value", [None, False, True, 0, "", "x", np.bool_(False)], ids=repr)
def test_read_options_rejects_unknown_names(value):
    assert (
        error_of(foo=value) == "foo is not an option of LLM; docs/server_flags.md lists the options"
    )
    for name in ("speculative_adaptve", "disable_radix_cach", "page-size"):
        near = name.replace("-", "_").replace("adaptve", "adaptive").replace("cach", "cache")
        assert error_of(**{name: value}) == f"{name} is not an option of LLM; did you mean {near}?"


def test_unsupported_option_accepts_only_none_and_false():
    for name in UNSUPPORTED:
        if name in FIELDS or name in OF_A_SERVER:
            continue
        for value in (None, False, np.bool_(False)):
            assert read_options({name: value}) == read_options({})
        for value in (True, 2, "", "x"):
            assert error_of(**{name: value}).startswith(f"{name} is not supported: ")


def test_read_options_accepts_neutral_vllm_options():
    given = {"enable_prefix_caching": True, "pipeline_parallel_size": 1, "kv_cache_dtype": "auto"}
    assert read_options(given | {"max_model_len": 64}) == read_options({"context_length": 64})
    assert "enable_prefix_caching" in error_of(enable_prefix_caching=False)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_read_options_rejects_wrong_types(name):
    wrong = [[], {}, object(), b"x", True, False, 1.5, 5, "x"]
    item = FIELDS[name]
    noun, right = "(a string|a path|a number or a string|a dict of names and paths)", (str,)
    if item.default is False:
        noun, right = "True or False", (bool,)
    elif "low" in item.metadata:
        is_share = "is_share" in item.metadata
        noun, right = ("a number", (int, float)) if is_share else ("a whole number", (int,))
    elif name == "speculative_simulate_accept_length":
        right = (str, int, float)
    for value in wrong:
        if type(value) not in right:
            assert error_of(**{name: value}).startswith(f"{name} must be ")
            with pytest.raises(ConfigError, match=f"{name} must be {noun}, got "):
                read_options({name: value})
    assert read_options({name: None}) == read_options({})


def test_read_options_accepts_numpy_and_path_values():
    given = {"page_size": np.int64(32), "mem_fraction_static": np.float32(0.5)}
    read = read_options({**given, "disable_radix_cache": np.bool_(True), "model": Path("m")})
    assert (read.engine.page_size, read.engine.mem_fraction_static) == (32, 0.5)
    assert read.engine.disable_radix_cache
    assert read.model.model_path == "m"
    drafting = {"speculative_algorithm": "NEXTN", "speculative_simulate_accept_length": 2.5}
    assert read_options(drafting).speculative.speculative_simulate_accept_length == "2.5"


def test_read_options_accepts_flag_aliases():
    assert read_options({"tensor_parallel_size": 2}).ranks.tp_size == 2
    assert read_options({"tp_size": 2, "tp": 2}).ranks.tp_size == 2
    assert error_of(tp_size=2, tp=4) == "tp_size and tp are the same option; remove one"


def test_log_level_defaults_to_warning():
    assert read_options({}).observing.log_level == "warning"
    assert read_options({"log_level": "info"}).observing.log_level == "info"
    assert error_of(log_level="loud").startswith("log_level must be one of debug, info")


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("--tp must be 1, got 3; --x is no flag", "tp must be 1, got 3; x is no option"),
        ("give --speculative-accept-rule rejection.", 'give speculative_accept_rule="rejection".'),
        ("`--page-size 3` is not supported", "`page_size=3` is not supported"),
        (
            "add --speculative-algorithm NEXTN or leave the flag out",
            'add speculative_algorithm="NEXTN" or leave the option out',
        ),
        ("one well-known word -- and a dash - stay", "one well-known word -- and a dash - stay"),
    ],
)
def test_in_python_replaces_flags_with_option_names(sentence, expected):
    assert in_python(sentence) == expected


def test_in_python_preserves_paths_with_dashes():
    sentence = "the cache /a/models--meta-llama--x has none; give --download-dir"
    assert in_python(sentence) == "the cache /a/models--meta-llama--x has none; give download_dir"


def test_read_options_accepts_former_names_and_switches():
    assert read_options({"launcher": "local"}).ranks.distributed_executor_backend == "mp"
    assert read_options({"use_ray": True}).ranks.distributed_executor_backend == "ray"
    assert read_options({"use_ray": False}) == read_options({})
    assert error_of(use_ray="yes") == "use_ray must be True or False, got 'yes'"
    assert error_of(use_ray=True, launcher="local") == (
        "use_ray and launcher are the same option; remove one"
    )
