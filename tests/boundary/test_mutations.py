"""Every promise of the boundary has a planted fault that its test sees."""

from __future__ import annotations

import pytest

from tests.support.backends import make_backend
from tests.support.contract_host import Host, Texts, contract_limits, contract_model
from tests.support.mutations import MUTATIONS


@pytest.fixture(scope="module")
def plain_texts() -> Texts:
    """Filled while everything is healthy; a planted fault must not spoil what is right."""
    return {}


def new_host(texts: Texts) -> Host:
    config, weights = contract_model()
    return Host(make_backend("reference", config, weights, contract_limits(config), "NEXTN"), texts)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_makes_the_test_of_its_promise_fail(name, plain_texts, monkeypatch):
    mutation = MUTATIONS[name]
    mutation.proof(new_host(plain_texts))
    mutation.plant(monkeypatch)
    # A kept late row ends its request twice, which the engine's own books refuse.
    with pytest.raises((AssertionError, KeyError)):
        mutation.proof(new_host(dict(plain_texts)))
