"""Plan buffers: every field has the dtype and shape of its annotation."""

from dataclasses import dataclass, fields

import numpy as np
import pytest
from jaxtyping import Float32, Int32, Int64

from shared.boundary.buffers import empty_plan, neutral, sampling_layout
from shared.spec.sampling import Sampling
from tests.support.contract_host import contract_capacity, contract_model

CAPACITY = contract_capacity(contract_model()[0])


@dataclass(frozen=True)
class OneMore(Sampling):
    max_words: Int32[np.ndarray, "B K"]


@dataclass(frozen=True)
class TooWide(Sampling):
    max_words: Int64[np.ndarray, " B"]


@dataclass(frozen=True)
class Unbounded(Sampling):
    weights: Float32[np.ndarray, "B words"]


def test_sampling_layout_follows_field_annotations():
    layout = sampling_layout(OneMore, CAPACITY)
    assert layout["max_words"] == ((CAPACITY.max_bias,), np.int32)
    assert layout["seed"] == ((), np.uint32)
    assert layout["bias_values"] == ((CAPACITY.max_bias,), np.float32)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TooWide, "max_words: dtype must be one of float32, int32, uint32, got int64"),
        (Unbounded, "weights: axis words has no bound"),
    ],
)
def test_sampling_layout_rejects_unsupported_annotation(kind, message):
    with pytest.raises(TypeError, match=message):
        sampling_layout(kind, CAPACITY)


def test_padding_row_equals_neutral_sampling():
    program = CAPACITY.programs[0]
    padding, asked = empty_plan(program, CAPACITY).sampling, neutral(CAPACITY, program.batch)
    for field in fields(Sampling):
        of_plan, alone = getattr(padding, field.name), getattr(asked, field.name)
        assert of_plan.dtype == alone.dtype
        np.testing.assert_array_equal(of_plan, alone, err_msg=field.name)
    assert set(asked.top_k) == {CAPACITY.vocab}
