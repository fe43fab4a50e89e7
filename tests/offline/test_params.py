"""`SamplingParams`: the bounds of the HTTP API, and numbers of NumPy, torch and JAX."""

from collections import UserDict

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shared.offline.params import BOUNDS, SamplingParams
from shared.server.protocol.openai_types import CompletionRequest


def test_sampling_params_bounds_equal_http_schema():
    document = CompletionRequest.model_json_schema()
    parts = [*document["$defs"].values(), document]  # some fields are nested
    schema = {name: field for part in parts for name, field in part.get("properties", {}).items()}
    found = {}
    for name in BOUNDS:
        kind = schema[name].get("anyOf", [schema[name]])[0]
        found[name] = (kind.get("minimum", kind.get("exclusiveMinimum")), kind["maximum"])
        is_open = "exclusiveMinimum" in kind
        for value, is_in in ((found[name][0], not is_open), (found[name][1], True)):
            try:
                SamplingParams(**{name: value})
            except ValueError:
                assert not is_in, (name, value)
            else:
                assert is_in, (name, value)
    assert found == BOUNDS


def test_sampling_params_accept_numbers_of_any_library():
    for name, (_, high) in BOUNDS.items():
        one = SamplingParams(**{name: 1})
        for given in (np.int64(1), np.uint8(1), np.array(1), torch.tensor(1), jnp.int32(1)):
            assert SamplingParams(**{name: given}) == one
            assert type(getattr(SamplingParams(**{name: given}), name)) is int
        is_whole = name not in ("temperature", "top_p", "min_p") and "penalty" not in name
        for given in (np.float64(0.5), np.float32(0.5), torch.tensor(0.5)):
            if is_whole:
                with pytest.raises(ValueError, match=f"{name} must be a whole number"):
                    SamplingParams(**{name: given})
            else:
                assert getattr(SamplingParams(**{name: given}), name) == 0.5
        for given in (True, np.bool_(True), "1", [1], np.array([1]), np.nan, 1j, 10**40, high + 1):
            with pytest.raises(ValueError, match=f"{name} must be a "):
                SamplingParams(**{name: given})


def test_sampling_params_accept_lists_of_any_library():
    for stop in (("a", "b"), iter(["a", "b"]), np.array(["a", "b"]), {"b", "a"}, ["a", "b"]):
        assert SamplingParams(stop=stop).stop == ["a", "b"]
    for ids in ((5, 6), iter([5, 6]), np.array([5, 6]), torch.tensor([5, 6]), {5, 6}, range(5, 7)):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == [5, 6]
    for bias in ({np.int64(5): np.float32(1)}, UserDict({5: 1}), {5: torch.tensor(1.0)}):
        assert SamplingParams(logit_bias=bias).logit_bias == {5: 1}
    choice = SamplingParams(structured_outputs={"choice": ("a", np.str_("b"))}).form
    assert choice.value == ["a", "b"]
    schema = SamplingParams(structured_outputs={"json": UserDict({"enum": np.array([1])})}).form
    assert schema.value == {"enum": [1]}
    assert SamplingParams(return_trace=np.bool_(True)).return_trace is True


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stop": 5}, "stop must be a list of non-empty strings, got 5"),
        ({"stop": {"a": "b"}}, "stop must be a list of non-empty strings"),
        ({"stop": ""}, "stop must be a list of non-empty strings"),
        ({"stop": b"a"}, "stop must be a list of non-empty strings"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"stop_token_ids": {5: 6}}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": np.array([0.5])}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"logit_bias": [5]}, "logit_bias must be a mapping from token ids"),
        ({"logit_bias": {True: 1}}, "logit_bias must have token ids as its keys, got True"),
        ({"logit_bias": {5: True}}, "logit_bias must have numbers from -100 to 100, got True"),
        ({"structured_outputs": {"json": {"a": {1}}}}, "structured_outputs: json has a value of"),
        ({"return_trace": 1}, "return_trace must be true or false, got 1"),
    ],
)
def test_sampling_params_reject_lossy_values(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**fields)


def test_sampling_params_reject_unknown_field():
    with pytest.raises(AttributeError, match="temprature"):
        SamplingParams().temprature = 1.0
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
