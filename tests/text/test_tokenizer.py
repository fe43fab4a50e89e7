"""Incremental detokenization, stop strings across chunks, chat templates, tokenizer files."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers.utils.chat_template_utils import render_jinja_template

from shared.engine.request import Event, FinishReason
from shared.server.completions.choice import Choice, Speculation, StopStringMatcher
from shared.server.completions.logprobs import ScoredToken, TokenNames, for_completion
from shared.text.call_formats.registry import marks_of
from shared.text.chat_template import ChatTemplate, Conversation, TemplateError
from shared.text.parsing.delta import PassthroughParser
from shared.text.tokenizer import REPLACEMENT, Detokenizer, Tokenizer
from tests.support.http_fixtures import END, byte_tokenizer, save_tokenizer
from tests.support.special_token_tokenizer import marked_tokenizer

BYTES = Tokenizer(byte_tokenizer(), None, {})
TEXT = "héllo 你好 🦜🏽 end, ünd noch mehr 文字 to pass the window 🎉🎉"


WORDS = ["▁hello", "▁world", "s"]


def byte_id(byte: int) -> int:
    """Returns the token id of a single byte in `space_tokenizer`."""
    return len(WORDS) + byte


def space_tokenizer() -> Tokenizer:
    """Returns a tokenizer like Llama 2's: words with their space, byte fallback for others."""
    words = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return Tokenizer(tokenizer, None, {})


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


def event(tokens: list[int], accepted: int | None, reason: FinishReason | None = None) -> Event:
    return Event(1, tokens, accepted, reason, None, None)


def with_logprobs(given: Event) -> Event:
    """Returns the same event with a different logprob for each token."""
    return given._replace(logprobs=[(-float(t), [(t, -float(t))]) for t in given.tokens])


def new_choice(stops: tuple[str, ...], min_tokens: int = 0) -> Choice:
    parts = (Detokenizer(BYTES, []), StopStringMatcher(stops), PassthroughParser(), min_tokens)
    return Choice(*parts, Speculation.empty(3), "", (ord("."),))


def test_detokenizer_never_splits_characters():
    given_pieces = pieces(BYTES, [], list(TEXT.encode()))
    assert "".join(given_pieces) == TEXT
    assert REPLACEMENT not in "".join(given_pieces)
    assert given_pieces[1:3] == ["", "é"]  # each of its two bytes is a token


@given(st.lists(st.integers(0, 255), max_size=80))
@settings(deadline=None, max_examples=200)
def test_detokenizer_pieces_of_any_bytes_equal_text(data: list[int]):
    assert "".join(pieces(BYTES, [], data)) == bytes(data).decode(errors="replace")


def test_detokenizer_flush_returns_replacement_for_incomplete_character():
    assert pieces(BYTES, [], list("a🦜".encode())[:-1]) == ["a", "", "", "", REPLACEMENT]


def test_detokenizer_ignores_special_and_unknown_ids():
    assert "".join(pieces(BYTES, [], [104, END, 299, 105])) == "hi"


def test_detokenizer_preserves_leading_space_after_prompt():
    tokenizer = space_tokenizer()
    assert "".join(pieces(tokenizer, [0], [1, 2])) == " worlds"
    assert "".join(pieces(tokenizer, [], [1] * 40)) == "world" + " world" * 39


def test_detokenizer_joins_byte_tokens_to_characters():
    tokens = [0, *map(byte_id, "你".encode()), 1]
    assert pieces(space_tokenizer(), [], tokens) == ["hello", "", "", "你", " world", ""]


def space_tokens(text: str) -> list[int]:
    """Tokenizes for `space_tokenizer`: its words as tokens, all else as single bytes."""
    words, tokens = {" hello": 0, " world": 1}, []
    for part in re.split("( hello| world)", text):
        tokens += [words[part]] if part in words else [3 + byte for byte in part.encode()]
    return tokens


RUNS = ["🎉🎉", "👍🏽", "❤️", "😀😁😂 ab", "— “quoted” … hello", "é world你好 hello hello🎉" * 9]


@pytest.mark.parametrize("text", RUNS, ids=range(len(RUNS)))
@pytest.mark.parametrize("prompt", [[], [0], [3 + 0xBD], [*range(3 + 0xA0, 3 + 0xB0)]], ids=len)
def test_detokenizer_byte_token_runs_equal_text(text, prompt):
    given_pieces = pieces(space_tokenizer(), prompt, space_tokens(text))
    assert "".join(given_pieces) == text
    assert given_pieces[-1] == ""  # no text is held back until the end
    assert len([piece for piece in given_pieces if piece]) >= len(re.findall(r"\W", text)) / 2


WORDS_AND_BYTES = st.lists(
    st.one_of(st.sampled_from([" hello", " world"]), st.characters(codec="utf-8")), max_size=60
)


@given(WORDS_AND_BYTES)
@settings(deadline=None, max_examples=200)
def test_detokenizer_words_and_byte_tokens_equal_text(parts: list[str]):
    text = "".join(parts)
    assert "".join(pieces(space_tokenizer(), [0], space_tokens(text))) == text


def test_detokenizer_incomplete_character_is_one_replacement():
    half = [3 + byte for byte in "好".encode()[:2]]
    got = pieces(space_tokenizer(), [0], [*half, 1, *half])
    assert "".join(got) == f"{REPLACEMENT} world{REPLACEMENT}"


@given(st.binary(max_size=40))
@settings(deadline=None, max_examples=50)
def test_bytes_of_tokens_equal_text_bytes(data: bytes):
    assert b"".join(BYTES.bytes_of(token) or b"?" for token in data) == data
    spaces = space_tokenizer()
    tokens = [3 + byte for byte in data]
    assert (
        b"".join(spaces.bytes_of(token) or b"?" for token in [1, 2, *tokens]) == b" worlds" + data
    )


def test_token_names_use_text_bytes_or_id():
    names = TokenNames(BYTES)
    assert names.name(ord(" ")) == " "
    assert names.name(0xC3) == r"bytes:\xc3"
    assert names.name(END) == "<|end|>"
    assert names.name(299) == "token_id:299"
    assert names.bytes_of(299) is None
    assert TokenNames(None).name(65) == "token_id:65"


def test_top_logprobs_keep_tokens_of_same_text():
    entry = ScoredToken(2, -1.0, [(byte_id(ord("s")), -0.5)], 0)  # as a word and as a byte
    found = for_completion([entry], TokenNames(space_tokenizer()))
    assert found["top_logprobs"] == [{"s": -0.5, "token_id:2": -1.0}]


@pytest.mark.parametrize("seed", range(20))
def test_stop_string_matcher_independent_of_chunks(seed: int):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(60))
    stops = tuple("".join(rng.choice("ab") for _ in range(rng.randint(3, 6))) for _ in range(3))
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    want = text[: min(ends)[1]] if ends else text
    finder, got, rest, matched = StopStringMatcher(stops), "", text, None
    while rest and not matched:
        size = rng.randint(1, 5)
        given_text, matched = finder.push(rest[:size], armed=True)
        got, rest = got + given_text, rest[size:]
    first = text[min(ends)[1] : min(ends)[0]] if ends else None
    assert (got if matched else got + finder.flush(), matched) == (want, first)


def test_stop_string_matcher_holds_back_partial_match():
    finder = StopStringMatcher(("STOP",))
    assert finder.push("go ST", armed=True) == ("go ", None)
    assert finder.push("ST", armed=True) == ("ST", None)
    assert finder.push("OP!", armed=True) == ("", "STOP")


def test_stop_string_truncates_tokens_text_and_statistics():
    """Other servers truncate tokens, usage and statistics differently (s#26163, s#39826)."""
    choice = new_choice(("lo w",))
    choice.take(event(list(b"h"), None))
    choice.take(event(list(b"ell"), 2))
    piece = choice.take(event(list(b"o world"), 3))
    assert (piece.delta.text, piece.tokens, piece.finish_reason) == ("", list(b"o w"), "stop")
    assert choice.tokens == list(b"hello w")
    assert choice.speculation.to_json() == {
        "verify_steps": 2,
        "accept_length": 3.5,
        "accept_length_histogram": [0, 0, 1, 1],
    }


def test_stop_string_truncates_logprobs_with_offsets():
    """Other servers truncate tokens and logprobs differently (s#26163, s#39826)."""
    choice = new_choice(("lo",))
    choice.take(with_logprobs(event(list("é".encode()), None)))
    piece = choice.take(with_logprobs(event(list(b"hel"), 2)))
    assert [entry.offset for entry in piece.logprobs] == [1, 2, 3]
    piece = choice.take(with_logprobs(event(list(b"lo wor"), 3)))
    assert piece.tokens == list(b"lo") == [entry.token for entry in piece.logprobs]
    assert [entry.token for entry in choice.logprobs] == choice.tokens
    assert [entry.offset for entry in choice.logprobs] == [0, 0, 1, 2, 3, 4, 5]
    assert choice.logprobs[-1].best == [(ord("o"), -float(ord("o")))]


def test_stop_string_takes_precedence_over_length():
    """Another server reported the length limit despite an earlier stop string (s#31599)."""
    choice = new_choice(("b",))
    piece = choice.take(event(list(b"abc"), 2, FinishReason.LENGTH))
    assert (piece.delta.text, choice.tokens, choice.finish_reason) == ("a", list(b"ab"), "stop")


def test_stop_string_before_min_tokens_is_ignored():
    choice = new_choice(("b",), min_tokens=3)
    assert choice.take(event(list(b"abcab"), 3)).delta.text == "abca"
    assert choice.tokens == list(b"abcab")


def test_stop_token_is_counted_without_text():
    choice = new_choice(())
    piece = choice.take(event(list(b"ab."), 2, FinishReason.STOP))
    assert (piece.delta.text, choice.tokens) == ("ab", list(b"ab."))


def test_choice_returns_held_text_at_finish():
    choice = new_choice(("xyz",))
    assert choice.take(event(list(b"abxy"), None)).delta.text == "ab"
    assert choice.take(event(list(b"x"), 0, FinishReason.LENGTH)).delta.text == "xyx"


def test_encode_chat_renders_template_and_raises_its_errors(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode_chat([{"role": "user", "content": "<hé>"}])
    assert ids == [257, *"<hé>".encode(), 258]
    with pytest.raises(TemplateError, match="no system"):
        tokenizer.encode_chat([{"role": "system", "content": "x"}])


# Marks of assistant output for training, with loops and scopes inside.
MARKED = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% set x = 1 %}"
    "{% for c in m.content %}{{ c }}{% endfor %}\n"
    "{% endgeneration %}{{ x }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
DUMPED = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{{ messages | tojson(ensure_ascii=True) }}",
    "{{ messages | tojson(ensure_ascii=False, separators=(',', ':')) }}",
    "{{ messages | tojson(sort_keys=true, separators=[', ', ': ']) }}",
    "{{ messages | tojson(True, 1) }}",
]


@pytest.mark.parametrize("template", [MARKED, *DUMPED])
def test_render_chat_matches_transformers(tmp_path, template):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    messages = [{"role": "user", "content": "<hé>"}, {"role": "assistant", "content": "ja"}]
    (want,), _ = render_jinja_template([messages], chat_template=template)
    assert tokenizer.render_chat(Conversation(messages)) == want


ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}<s>{{ m.content }}{% endif %}{% endfor %}"
)


def test_developer_role_becomes_system_if_unsupported(tmp_path):
    """Other servers pass the role on, and most templates drop such a message (s#40082)."""
    save_tokenizer(tmp_path)
    messages = [{"role": "developer", "content": "be brief"}]
    known = "{# developer #}{{ messages[0].role }} {{ messages[0].content }}"
    for more, want in (("", "<s>be brief"), (known, "developer be brief")):
        (tmp_path / "chat_template.jinja").write_text(ROLES + more)
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer is not None
        assert tokenizer.render_chat(Conversation(messages)) == want
    assert messages[0]["role"] == "developer"


def test_chat_template_rejects_unsafe_attributes(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    with pytest.raises(TemplateError, match="unsafe"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_tokenizer_from_folder_names_broken_file(tmp_path, name, content):
    save_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="cannot be read|not valid JSON|JSON object") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_encode_ignores_stored_truncation_and_padding(tmp_path):
    save_tokenizer(tmp_path)
    stored = byte_tokenizer()
    stored.enable_truncation(16)
    stored.enable_padding(length=24)
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    for text in ("hi", "x" * 100):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.encode_more(text) == list(text.encode())
    ids = tokenizer.encode_chat([{"role": "user", "content": "x" * 100}])
    assert ids == [257, *b"x" * 100, 258]


def test_tokenizer_from_empty_folder_returns_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("special", [True, False])
def test_decode_shows_delimiters_that_are_special_tokens(tmp_path, special):
    """The parser needs the delimiter; without a parser it is hidden like other special tokens."""
    save_tokenizer(tmp_path, marked_tokenizer(special=special))
    text = "<think>hm</think><tool_call>{}</tool_call>"
    for marks, shown in ((marks_of("hermes", "qwen3"), text), ((), "hm{}" if special else text)):
        tokenizer = Tokenizer.from_folder(tmp_path, marks)
        assert tokenizer is not None
        tokens = tokenizer.encode(f"<|user|>{text}<|end|>")
        assert len(tokens) == 6 + len("hm{}")
        assert tokenizer.decode(tokens) == shown
        assert "".join(pieces(tokenizer, [], tokens)) == shown


CALLS_ALONE = (  # form of DeepSeek V3's template
    "{% for m in messages %}{% if m.role == 'tool' %}<out>{{ m.content }}{% elif m.tool_calls %}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LISTING = {
    "at once": "{% if tools %}{{ tools | tojson }}{% endif %}",
    "where it is defined": "{% if tools is defined %}{{ tools | tojson }}{% endif %}",
    "with a default": (  # form of Llama 3.1's template
        "{% if not tools is defined %}{% set tools = none %}{% endif %}"
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    ),
    "in a macro": "{% macro list() %}{{ tools | tojson }}{% endmacro %}{{ list() }}",
    "by a macro": (
        "{% macro list(given) %}{{ given | tojson }}{% endmacro %}{{ list(tools) if tools }}"
    ),
    "in a loop": "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}",
}
CALLED = {"type": "function", "function": {"name": "SECRET_NAME", "parameters": {}}}


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def test_render_rejects_tools_of_template_without_tools():
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(
        TemplateError, match="the chat template of the model does not support tools"
    ):
        template_of(CALLS_ALONE).render(Conversation(messages, [CALLED]))
    answered = [*messages, {"role": "tool", "content": "4"}]
    assert template_of(CALLS_ALONE).render(Conversation(answered)) == "hi<out>4"


@pytest.mark.parametrize("way", LISTING)
def test_render_writes_tools_for_any_template_form(way):
    text = template_of(LISTING[way]).render(Conversation([], [CALLED]))
    assert "SECRET_NAME" in text


@pytest.mark.parametrize("part", ["tools", "messages"])
def test_render_rejects_omitted_function(part: str):
    """The template mentions tools and calls, and writes neither for these messages."""
    template = template_of("{% if tools == 1 %}{{ tools }}{% endif %}{# tool_calls #}")
    called = [{"role": "assistant", "content": "a", "tool_calls": [CALLED]}]
    asked = Conversation([], [CALLED]) if part == "tools" else Conversation(called)
    with pytest.raises(TemplateError, match="omits the function 'SECRET_NAME'") as refused:
        template.render(asked)
    assert refused.value.part == part


def test_render_rejects_tools_overwritten_by_template():
    with pytest.raises(TemplateError, match="does not support tools"):
        template_of("{% set tools = ['mine'] %}{{ tools }}").render(Conversation([], [CALLED]))
