"""Conversion of NumPy, torch and JAX values to Python values, without loss."""

import array
import collections
import types
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shared.offline.prompts import listed_chats, listed_prompts
from shared.offline.values import as_json, items_of, number, token_ids, truth, whole_number

IDS = [5, 6, 7]
MESSAGE = {"role": "user", "content": "a"}


def lists_of(items):
    """Yields the items in every kind of ordered iterable."""
    yield from (list(items), tuple(items), collections.deque(items), collections.UserList(items))
    yield from (iter(items), (item for item in items), map(lambda item, _: item, items, items))
    yield type("Prompts", (), {"__iter__": lambda self: iter(items)})()


NO_LISTS = [
    *(None, 5, 5.5, True, np.int64(5), np.array(5), "abc", b"abc", bytearray(b"abc")),
    *(memoryview(b"abc"), collections.UserString("abc"), {1: 2}, {1, 2}, frozenset([1])),
    *({1: 2}.keys(), {1: 2}.values(), {1: 2}.items(), types.MappingProxyType({1: 2})),
    *(collections.UserDict({1: 2}), object(), type("Frame", (), {"keys": 0, "__iter__": iter})()),
]


@pytest.mark.parametrize("given", NO_LISTS, ids=lambda value: type(value).__name__)
def test_unordered_values_are_rejected_as_lists(given):
    assert items_of(given) is None
    assert token_ids(given) is None
    with pytest.raises(ValueError, match="messages must be a list of messages, got "):
        listed_chats(given)
    if not isinstance(given, str):
        with pytest.raises(
            ValueError, match="a prompt must be a string or a list of token ids, got"
        ):
            listed_prompts(given)


def test_listed_prompts_reads_ids_of_any_library():
    arrays = [np.array(IDS), np.array(IDS, np.uint16), array.array("i", IDS), torch.tensor(IDS)]
    arrays += [jnp.array(IDS), list(map(np.int32, IDS)), list(torch.tensor(IDS)), range(5, 8)]
    for given in (*lists_of(IDS), *arrays):
        (prompt,) = listed_prompts(given)
        assert token_ids(prompt) == IDS
        assert all(type(each) is int for each in token_ids(prompt))


def test_listed_prompts_accepts_any_iterable():
    for given in (*lists_of(["a", IDS, np.array(IDS)]), iter(["a", iter(IDS), tuple(IDS)])):
        text, *ids = listed_prompts(given)
        assert (text, [token_ids(each) for each in ids]) == ("a", [IDS, IDS])
    for given in (np.array([IDS, IDS]), torch.tensor([IDS, IDS])):
        assert list(map(token_ids, listed_prompts(given))) == [IDS, IDS]
    assert listed_prompts(np.array(["a", "b"])) == ["a", "b"]
    assert [] == listed_prompts([]) == listed_prompts(iter([]))


def test_listed_chats_accepts_one_or_several_conversations():
    for given in lists_of([MESSAGE, collections.UserDict(MESSAGE)]):
        assert listed_chats(given) == [[MESSAGE, MESSAGE]]
    for given in lists_of([[MESSAGE], (MESSAGE,)]):
        assert listed_chats(given) == [[MESSAGE], [MESSAGE]]
    assert listed_chats(iter([iter([MESSAGE])])) == [[MESSAGE]]
    for given in ([["a"]], ["a"], [[]], [MESSAGE, "a"], [[MESSAGE], MESSAGE]):
        with pytest.raises(ValueError, match="a (message|conversation) must be a "):
            listed_chats(given)


def test_number_reads_values_of_any_library():
    for given in (3, np.int8(3), np.uint64(3), np.array(3), torch.tensor(3), jnp.int32(3)):
        assert (whole_number(given), number(given)) == (3, 3)
        assert type(whole_number(given)) is int
    for given in (0.5, np.float64(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5)):
        assert (whole_number(given), number(given)) == (None, 0.5)
    assert (number(Fraction(1, 2)), number(jnp.float32(0.5))) == (0.5, 0.5)
    for given in (True, np.bool_(True), torch.tensor(True), "3", None, 1j, np.array([3]), [3]):
        assert whole_number(given) is None
        assert number(given) is None


def test_truth_reads_booleans_of_any_library():
    assert [truth(np.bool_(True)), truth(torch.tensor(False)), truth(True)] == [True, False, True]
    assert all(truth(given) is None for given in (1, 0, None, "yes", np.int64(1), np.array([True])))


def test_as_json_rejects_non_json_values():
    given = {"a": (1, np.float32(0.5)), "b": np.array([1]), "c": np.bool_(True), "d": None}
    assert as_json(given, "x") == {"a": [1, 0.5], "b": [1], "c": True, "d": None}
    circle = []
    circle.append(circle)
    for wrong in ({"a": {1}}, {5: "a"}, [b"a"], object(), circle):
        with pytest.raises(ValueError, match="^x "):
            as_json(wrong, "x")
