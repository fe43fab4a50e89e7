"""The n-gram index: trees of the reference, eviction, ties, tenants and corpora."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.ngram import index as ngram_index
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.trie import COUNT, FIRST, LIVE, NEWER, OLDEST, PARENT, USED
from shared.engine.request import InvalidRequestError, Request, SamplingParams
from shared.options.ngram import NgramConfig
from tests.support import ngram_reference as reference

VOCAB = 1000
NODES, DEPTH = 8, 7


def ngram_config(**fields) -> NgramConfig:
    return NgramConfig(**{f"speculative_ngram_{name}": value for name, value in fields.items()})


def index_of(
    *, nodes: int = NODES, depth: int = DEPTH, chain: bool = False, **fields
) -> NgramIndex:
    return NgramIndex(ngram_config(**fields), nodes=nodes, depth=depth, vocab=VOCAB, chain=chain)


def request(number: int, *, tenant: str = "", max_drafts: int | None = None) -> Request:
    sampling = SamplingParams(max_draft_tokens=max_drafts)
    return Request(request_id=number, prompt=(), sampling=sampling, tenant=tenant)


def trees_of(index: NgramIndex, queried: list[Request]) -> list[reference.Tree]:
    drafts = index.draft(queried)
    return [
        (drafts.tokens[row, :size].tolist(), drafts.parents[row, :size].tolist())
        for row, size in enumerate(drafts.num_nodes)
    ]


def tree_of(index: NgramIndex, queried: Request) -> reference.Tree:
    """The tree of one request after all its tokens are learnt."""
    index.draft([queried])
    index.learn()
    return trees_of(index, [queried])[0]


def learn_tokens(index: NgramIndex, one: Request, tokens: list[int]) -> None:
    """Adds tokens and learns them at once."""
    index.add_tokens(one, tokens)
    tree_of(index, one)


def corpus_of(*documents: list[int]) -> Corpus:
    words = [token for document in documents for token in [*document, SEPARATOR]]
    return Corpus.build(np.array(words, np.int32))


def after(text: list[int], **fields) -> reference.Tree:
    """The tree after a token sequence in an otherwise empty index."""
    index, one = index_of(**fields), request(1)
    index.add_tokens(one, text)
    return tree_of(index, one)


TOKENS = st.integers(0, 3)
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(TOKENS, min_size=1, max_size=6)),
    min_size=1,
    max_size=12,
)
DOCUMENTS = st.lists(st.lists(TOKENS, min_size=1, max_size=12), min_size=1, max_size=3)


@settings(deadline=None, max_examples=50)
@given(
    steps=STEPS,
    corpora=st.lists(DOCUMENTS, max_size=3),
    by_frequency=st.booleans(),
    longest=st.integers(2, 6),
    limit=st.integers(1, 12),
    depth=st.integers(1, 6),
    breadths=st.sampled_from([(1, 1), (1, 4), (2, 3)]),
    budget=st.integers(0, 6),
    chain=st.booleans(),
)
def test_ngram_index_trees_match_reference(
    steps, corpora, by_frequency, longest, limit, depth, breadths, budget, chain
):
    """Four requests of two tenants in any commit order; trees lack the newest n-grams."""
    index = index_of(
        nodes=12,
        depth=depth,
        chain=chain,
        max_trie_depth=longest,
        match_type="PROB" if by_frequency else "BFS",
        min_bfs_breadth=breadths[0],
        max_bfs_breadth=breadths[1],
        external_sam_budget=budget,
    )
    if budget:
        for number, documents in enumerate(corpora):
            index.corpora.add(str(number), corpus_of(*documents))
    requests = [request(n, tenant="ab"[n % 2], max_drafts=limit - 1) for n in range(4)]
    texts: list[list[int]] = [[] for _ in requests]
    seen = [reference.SeenText(longest) for _ in range(2)]
    unread: list[list[int]] = [[] for _ in requests]
    for number, tokens in steps:
        index.add_tokens(requests[number], tokens)
        unread[number] += tokens
        asked = sorted({number, 0})
        trees = trees_of(index, [requests[each] for each in asked])
        assert trees == [
            reference.draft(
                texts[each] + unread[each],
                seen[each % 2],
                corpora if budget else [],
                limit=limit,
                depth=depth,
                by_frequency=by_frequency,
                breadths=breadths,
                corpus_nodes=budget,
                chain=chain,
            )
            for each in asked
        ]
        for each in asked:
            for token in unread[each]:
                seen[each % 2].learn(texts[each], token)
                texts[each].append(token)
            unread[each] = []


@settings(deadline=None, max_examples=60)
@given(documents=DOCUMENTS, text=st.lists(TOKENS, max_size=20))
def test_suffix_automaton_finds_longest_match_first_occurrence(documents, text):
    index, one = index_of(external_sam_budget=7, max_trie_depth=2), request(1)
    index.corpora.add("it", corpus_of(*documents))
    learn_tokens(index, one, text)
    tree_of(index, one)
    rows = np.array([index._text(one).row], np.int32)
    paths, lengths, matched = index.corpora.continuations(rows, DEPTH)
    size, path = reference.corpus_match(text, documents)
    assert int(matched[0, 0]) == size
    assert paths[0, 0, : lengths[0, 0]].tolist() == path[:DEPTH]


def test_ngram_index_drafts_continuation_of_repeated_text():
    assert after([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]) == (
        [0, 3, 4, 5, 6, 7, 8, 9],
        [0, 0, 1, 2, 3, 4, 5, 6],
    )


def test_ngram_index_without_match_returns_root_only():
    assert after([1, 2, 3, 4]) == ([0], [0])


def test_ngram_index_siblings_unique_and_newest_first():
    tokens, parents = after([1, 2, 1, 3, 1, 2, 1], max_trie_depth=2, max_bfs_breadth=4)
    siblings = list(zip(parents[1:], tokens[1:], strict=True))
    assert len(set(siblings)) == len(siblings)
    assert tokens[1:3] == [2, 3]


def test_match_type_bfs_prefers_recency_prob_frequency():
    text = [1, 2, 9, 1, 2, 8, 1, 3, 7, 1]
    how = {"max_trie_depth": 2, "max_bfs_breadth": 1}
    assert after(text, match_type="BFS", **how)[0][1] == 3
    assert after(text, match_type="PROB", **how)[0][1] == 2


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_match_type_ties_ordered_newest_first(match_type):
    """Trap: the order of an unordered map differs between builds."""
    text = [token for follower in (7, 5, 6) for token in (1, follower)] + [1]
    tokens, parents = after(text, match_type=match_type, max_trie_depth=2, max_bfs_breadth=3)
    assert (tokens[1:], parents[1:]) == ([6, 5, 7], [0, 0, 0])


@pytest.mark.parametrize("max_drafts", [0, 1, 3])
def test_ngram_index_respects_max_draft_tokens(max_drafts):
    index, one = index_of(), request(1, max_drafts=max_drafts)
    learn_tokens(index, one, [1, 2, 3, 4, 5, 6, 1])
    assert len(tree_of(index, one)[0]) == 1 + max_drafts


def test_ngram_index_tree_limited_to_shape_depth():
    index, one = index_of(depth=2, external_sam_budget=3), request(1)
    index.corpora.add("it", corpus_of([1, 2, 3, 4, 5]))
    learn_tokens(index, one, [1, 2, 3, 4, 5, 1])
    tokens, parents = tree_of(index, one)
    assert (tokens, parents) == ([0, 2, 3], [0, 0, 1])


def test_ngram_index_isolates_tenants():
    index = index_of()
    learn_tokens(index, request(1, tenant="a"), [1, 2, 3, 4, 5])
    learn_tokens(index, request(2, tenant="b"), [1])
    learn_tokens(index, request(3, tenant="a"), [1])
    assert tree_of(index, request(2, tenant="b")) == ([0], [0])
    assert tree_of(index, request(3, tenant="a"))[0] == [0, 2, 3, 4, 5]


def test_ngram_index_reuses_finished_requests_of_tenant():
    index, first = index_of(), request(1)
    learn_tokens(index, first, [1, 2, 3])
    index.end(first, is_learnt=True)
    learn_tokens(index, request(2), [1])
    assert tree_of(index, request(2))[0] == [0, 2, 3]


def test_ngram_request_scope_shares_and_keeps_nothing():
    index = index_of(scope="request")
    requests = [request(number) for number in range(3)]
    for each in requests:
        learn_tokens(index, each, [1, 2, 3, 1])
    for each in requests:
        assert tree_of(index, each)[0] == [0, 2, 3, 1]
    for each in requests:
        index.end(each, is_learnt=True)
    assert index.num_ngrams == index.trie.num_nodes == 0
    learn_tokens(index, request(9), [1])
    assert tree_of(index, request(9)) == ([0], [0])


def test_truncate_removes_ngrams_after_stop():
    index, one = index_of(), request(1)
    learn_tokens(index, one, [1, 2, 3])
    tree_of(index, one)
    before = index.num_ngrams
    learn_tokens(index, one, [4, 5])
    one.output[:] = [1, 2, 3, 4, 5]
    index.end(one, is_learnt=True)
    assert index.num_ngrams > before
    index.truncate(1, 3)
    assert index.num_ngrams == before
    index.truncate(1, 0)  # a truncated request is unknown
    assert index.num_ngrams == before
    learn_tokens(index, request(2), [1, 2])
    assert tree_of(index, request(2))[0] == [0, 3]


def test_truncate_of_unlearnt_request_removes_only_learnt_ngrams():
    index, one = index_of(), request(1)
    learn_tokens(index, request(2), [1, 2, 3, 4])
    learn_tokens(index, one, [1, 2])
    learnt = index.num_ngrams
    one.output[:] = [1, 2, 3, 4]
    index.add_tokens(one, one.output[2:])
    index.end(one, is_learnt=False)
    index.truncate(1, 2)
    assert index.num_ngrams == learnt


def test_end_unlearnt_discards_pending_prompt():
    index, one = index_of(), Request(request_id=1, prompt=(7, 8), sampling=SamplingParams())
    index.add_prompt(one, 2)
    index.end(one, is_learnt=False)
    learn_tokens(index, request(2), [1, 7])
    assert tree_of(index, request(2)) == ([0], [0])


def test_truncate_preserves_ngrams_of_other_requests():
    index = index_of()
    one, other = request(1), request(2)
    for each in (one, other):
        learn_tokens(index, each, [1, 2, 3])
    one.output[:] = [1, 2, 3]
    index.end(one, is_learnt=True)
    index.truncate(1, 2)
    learn_tokens(index, request(3), [1, 2])
    assert tree_of(index, request(3))[0] == [0, 3]


def test_ngram_index_bounds_ended_tokens(monkeypatch):
    monkeypatch.setattr(ngram_index, "MOST_ENDED_TOKENS", 20)
    index = index_of(max_trie_depth=4)
    for number in range(10):
        one = request(number)
        one.output[:] = [10 * number + place for place in range(8)]
        learn_tokens(index, one, one.output)
        index.end(one, is_learnt=True)
    assert index.num_ended_tokens == 16
    before = index.num_ngrams
    index.truncate(7, 0)
    assert index.num_ngrams == before
    index.truncate(8, 0)
    index.truncate(9, 0)
    assert index.num_ngrams < before
    assert (index.num_ended_tokens, index.ended) == (0, {})


def assert_sound(index: NgramIndex) -> None:
    """Asserts that parents list every live node and the eviction order has each leaf once."""
    nodes, head = index.trie.nodes, index.trie.head
    order, node = [], int(head[OLDEST])
    while node:
        order.append(node)
        node = int(nodes[node, NEWER])
    used = np.arange(1, head[USED])
    below = used[nodes[used, PARENT] > 0]
    leaves = below[nodes[below, FIRST] == 0]
    assert sorted(order) == leaves.tolist()
    assert len(below) + len(index.scopes) == head[LIVE] < len(nodes)
    assert (nodes[below, COUNT] > 0).all()


def test_ngram_index_evicts_min_recently_used():
    capacity = 1024
    index, rng = index_of(capacity=capacity, max_trie_depth=4), np.random.default_rng(3)
    old, loved, writer = request(1), request(2), request(3)
    learn_tokens(index, old, [900, 901, 902])
    learn_tokens(index, loved, [910, 911, 912])
    for number in range(40):
        learn_tokens(index, writer, rng.integers(0, 500, 20).tolist())
        if number % 4 == 0:  # 80 tokens are 320 n-grams, well below the capacity
            learn_tokens(index, loved, [910, 911, 912])
    assert_sound(index)
    assert capacity - 8 <= index.trie.num_nodes < capacity == len(index.trie.nodes)
    learn_tokens(index, request(4), [900])
    assert tree_of(index, request(4)) == ([0], [0])
    learn_tokens(index, request(5), [910])
    assert tree_of(index, request(5))[0][:3] == [0, 911, 912]


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 99), scope=st.sampled_from(["tenant", "request"]))
def test_full_ngram_index_stays_consistent(seed, scope):
    rng = np.random.default_rng(seed)
    index = index_of(capacity=1024, max_trie_depth=6, scope=scope)
    alive: dict[int, Request] = {}
    for number in range(60):
        alive[number] = request(number, tenant=str(rng.integers(3)))
        for each in alive.values():
            tokens = rng.integers(0, 30, 8).tolist()
            index.add_tokens(each, tokens)
            each.output += tokens
        index.draft(list(alive.values()))
        if number > 4:
            ended = alive.pop(int(rng.choice(list(alive))))
            index.end(ended, is_learnt=True)
            index.truncate(ended.request_id, len(ended.output) - int(rng.integers(4)))
    assert_sound(index)


def test_ngram_index_is_deterministic():
    def run() -> list[reference.Tree]:
        rng = np.random.default_rng(5)
        index = index_of(capacity=1024, max_trie_depth=6, match_type="PROB")
        trees = []
        for _ in range(200):
            one = request(int(rng.integers(4)))
            index.add_tokens(one, rng.integers(0, 20, 5).tolist())
            trees.append(tree_of(index, one))
        return trees

    assert run() == run()


def test_corpora_share_budget_and_trie_fills_remainder():
    index, one = index_of(external_sam_budget=4), request(1)
    index.corpora.add("a", corpus_of([1, 20, 21, 22, 23, 24, 25]))
    index.corpora.add("b", corpus_of([1, 30, 31, 32, 33, 34, 35]))
    learn_tokens(index, one, [1, 40, 41, 42, 1])
    tokens, parents = tree_of(index, one)
    assert tokens == [0, 20, 21, 30, 31, 40, 41, 42]
    assert parents == [0, 0, 1, 0, 3, 0, 5, 6]


def test_longest_matching_corpus_fills_unused_trie_nodes():
    index, one = index_of(external_sam_budget=2), request(1)
    index.corpora.add("short", corpus_of([2, 30, 31, 32, 33]))
    index.corpora.add("long", corpus_of([1, 2, 20, 21, 22, 23, 24, 25]))
    learn_tokens(index, one, [1, 2])
    assert tree_of(index, one)[0] == [0, 20, 30, 21, 22, 23, 24, 25]


def test_remove_corpus_stops_drafts_and_frees_name():
    index, one = index_of(external_sam_budget=2), request(1)
    learn_tokens(index, one, [1])
    index.corpora.add("it", corpus_of([1, 2, 3]))
    assert tree_of(index, one) == ([0], [0])  # matching starts with the next token of a request
    learn_tokens(index, one, [1])
    assert tree_of(index, one)[0] == [0, 2, 3, 1]
    index.corpora.remove("it")
    assert tree_of(index, one)[0] == [0, 1]
    with pytest.raises(InvalidRequestError, match="corpus 'it' not found"):
        index.corpora.remove("it")
    index.corpora.add("it", corpus_of([1, 5]))
    assert index.corpora.sizes == {"it": 2}


@pytest.mark.parametrize(
    ("documents", "budget", "reason"),
    [
        ([[1, 2]], 0, "--speculative-ngram-external-sam-budget"),
        ([[1, VOCAB]], 2, f"contains token id {VOCAB}; valid ids are 0 to {VOCAB - 1}"),
        ([[1, -2]], 2, "contains token id -2"),
        ([[]], 2, "at least one token"),
        ([[1, 2, 3, 4, 5]], 2, "--speculative-ngram-external-corpus-max-tokens is 6"),
    ],
)
def test_add_corpus_rejects_invalid_corpus(documents, budget, reason):
    index = index_of(external_sam_budget=budget, external_corpus_max_tokens=6)
    if budget:
        index.corpora.add("first", corpus_of([1, 2]))
    with pytest.raises(InvalidRequestError, match=reason):
        index.corpora.add("second", corpus_of(*documents))


def test_ngram_index_drops_empty_scopes():
    index = index_of(capacity=1024, max_trie_depth=2)
    for number in range(5000):
        one = request(number, tenant=f"tenant {number}")
        learn_tokens(index, one, [1, 2])
        index.draft([one])
        index.end(one, is_learnt=True)
    assert_sound(index)
    assert len(index.scopes) <= 600  # about 250 have n-grams; a new one checks two


def test_new_tenant_time_independent_of_tenant_count():
    """Otherwise all streams would wait for each new tenant."""
    index, times_s = index_of(max_trie_depth=2), []
    for number in range(8000):
        one = request(number, tenant=f"tenant {number}")
        began = time.perf_counter()
        index.add_tokens(one, [1, 2])
        times_s.append(time.perf_counter() - began)
        index.end(one, is_learnt=True)
    # A few microseconds; a scan of all tenants takes 8 ms.
    assert np.median(times_s[-1000:]) < 1e-3


def test_ngram_index_growth_reallocates_nothing():
    """The arrays keep their addresses, so no step copies them."""
    index, one = index_of(max_trie_depth=4), request(1)
    at = [array.__array_interface__["data"] for array in (index.trie.nodes, index.trie.buckets)]
    learn_tokens(index, one, np.random.default_rng(0).integers(0, VOCAB, 20_000).tolist())
    assert index.num_ngrams > 40_000
    now = [array.__array_interface__["data"] for array in (index.trie.nodes, index.trie.buckets)]
    assert now == at
