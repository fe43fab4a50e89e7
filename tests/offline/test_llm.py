"""`LLM`: the same outputs and the same errors as the HTTP server."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from jax_impl import LLM as JaxLLM
from shared.offline.options import OF_A_SERVER
from shared.options.flags import ConfigError
from shared.options.options import DEFAULT_MODEL
from shared.process import progress
from tests.support.http_fixtures import serving
from torch_impl import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "A cinema has 6 rows of 13 seats. How many seats?"}]
GREEDY = {"temperature": 0.0, "max_tokens": 64}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 48}
OPTIONS = {"max_running_requests": 4, "context_length": 256}
WITHOUT = {"grammar_backend": "none", "tool_call_parser": "none"}


@pytest.fixture(scope="module")
def llm():
    with LLM(speculative_algorithm="NEXTN", max_prompt_logprobs=2, **WITHOUT, **OPTIONS) as it:
        yield it


@pytest.fixture(scope="module")
def server():
    flags = ["--max-running-requests", "4", "--context-length", "256"]
    with serving(["-m", "torch_impl.serve", "--port", "0", *flags]) as it:
        yield it


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_llm_chat_equals_server_response(llm, server, how):
    (answer,) = llm.chat(QUESTION, SamplingParams(**how, n=2))
    reported = server.post("/v1/chat/completions", messages=QUESTION, **how, n=2).json()
    assert [o.text for o in answer.outputs] == [
        c["message"]["content"] for c in reported["choices"]
    ]
    assert [o.finish_reason for o in answer.outputs] == [
        c["finish_reason"] for c in reported["choices"]
    ]
    assert answer.outputs[0].accept_length > 2


def test_jax_llm_chat_matches_torch(llm, quick_jax):
    asked = SamplingParams(**SAMPLED)
    few = {"max_running_requests": 1, "chunked_prefill_size": 64, "disable_radix_cache": True}
    with JaxLLM(speculative_algorithm="NEXTN", **WITHOUT, **OPTIONS | few) as other:
        theirs, ours = other.chat(QUESTION, asked)[0], llm.chat(QUESTION, asked)[0]
    assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
    assert theirs.outputs[0].accept_length_histogram == ours.outputs[0].accept_length_histogram


def test_generate_batch_preserves_order_and_tokens(llm):
    prompts = ["Tom has 3", llm.tokenizer.encode("Ann buys 2"), "Raj makes 6"]
    together = llm.generate(prompts, SamplingParams(**GREEDY))
    alone = [llm.generate(prompt, SamplingParams(**GREEDY))[0] for prompt in prompts]
    assert [a.outputs[0].token_ids for a in together] == [a.outputs[0].token_ids for a in alone]
    assert [a.prompt for a in together] == ["Tom has 3", "", "Raj makes 6"]


def test_generate_accepts_sampling_params_per_prompt(llm):
    params = [SamplingParams(**GREEDY), SamplingParams(**SAMPLED)]
    together = llm.generate(["Tom has 3", "Ann buys 2"], params)
    for prompt, each, answer in zip(["Tom has 3", "Ann buys 2"], params, together, strict=True):
        assert answer.text == llm.generate(prompt, each)[0].text
    with pytest.raises(ValueError, match="one for each of 1 prompts, got 2"):
        llm.generate("Tom has 3", params)


def test_generate_accepts_arrays_of_token_ids(llm):
    ids = llm.tokenizer.encode(QUESTION[0]["content"])
    expected = llm.generate([ids, ids[:9]], SamplingParams(**GREEDY))
    for given in ([np.array(ids), np.array(ids[:9])], [tuple(ids), [np.int32(i) for i in ids[:9]]]):
        found = llm.generate(given, SamplingParams(**GREEDY, stop=None, logit_bias=None))
        assert [each.text for each in found] == [each.text for each in expected]
    (one,) = llm.generate(np.array(ids), SamplingParams(**GREEDY))
    assert one.text == expected[0].text


def test_generate_accepts_iterators(llm):
    short = SamplingParams(temperature=0, max_tokens=2)
    texts = ["Tom has 3", "Ann buys 2"]
    expected = [each.text for each in llm.generate(texts, short)]
    for given in (iter(texts), (text for text in texts), np.array(texts)):
        assert [each.text for each in llm.generate(given, iter([short, short]))] == expected
    ids = llm.tokenizer.encode(texts[0])
    assert (
        llm.generate(iter(ids), short)[0].text
        == expected[0]
        == llm.stream(iter(ids), short).result().text
    )
    reported = llm.chat(QUESTION, short)[0].text
    assert [each.text for each in llm.chat((iter(QUESTION) for _ in "ab"), short)] == [
        reported,
        reported,
    ]
    assert llm.stream(iter(QUESTION), short).result().text == reported


def test_generate_validates_modified_sampling_params(llm):
    asked = SamplingParams(temperature=0)
    asked.max_tokens, asked.stop = np.int64(2), ("a",)
    assert len(llm.generate("Tom has 3", asked)[0].outputs[0].token_ids) <= 2
    asked.temperature = 3
    with pytest.raises(ValueError, match="temperature must be a number from 0 to 2, got 3"):
        llm.generate("Tom has 3", asked)
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], 5):
        with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
            llm.generate("Tom has 3", wrong)


def test_stream_sync_and_async_equal_chat_text(llm):
    asked = SamplingParams(**SAMPLED, n=2)
    texts = [output.text for output in llm.chat(QUESTION, asked)[0].outputs]

    async def gathered():
        return [part async for part in llm.stream(QUESTION, asked)]

    for parts in (list(llm.stream(QUESTION, asked)), asyncio.run(gathered())):
        assert ["".join(p.text for p in parts if p.index == i) for i in range(2)] == texts
        assert [p.finish_reason for p in parts].count("stop") == 2
        assert len(parts) > 4


def test_abandoned_stream_ends_its_request(llm):
    for _ in llm.stream("Tom has", SamplingParams(temperature=1, seed=1, ignore_eos=True)):
        break
    (answer,) = llm.chat(QUESTION, SamplingParams(**GREEDY))  # waits for the engine's next steps
    assert answer.outputs[0].finish_reason == "stop"
    assert not llm._engine.num_requests


def test_chat_returns_logprobs_stop_reason_and_trace(llm):
    asked = SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=1, return_trace=True, stop="=")
    (answer,) = llm.chat(QUESTION, asked)
    output = answer.outputs[0]
    assert "=" not in output.text
    assert output.finish_reason == "stop"
    assert [entry.token for entry in output.logprobs] == output.token_ids
    assert all(len(entry.best) == 2 for entry in output.logprobs)
    assert [entry.token for entry in answer.prompt_logprobs] == answer.prompt_token_ids
    reported = [token["token"] for step in output.steps for token in step["tokens"]]
    assert reported == output.token_ids
    assert any(step["source"] == "draft" for step in output.steps)


def test_chat_from_six_threads_returns_same_text(llm):
    expected = llm.chat(QUESTION, SamplingParams(**GREEDY))[0].text
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(llm.chat(QUESTION, SamplingParams(**GREEDY))[0].text)
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 6


def called(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda llm: llm.generate([1 << 20]),
            "prompt contains token id 1048576; valid ids are 0 to",
        ),
        (lambda llm: llm.generate(""), "prompt must not be empty"),
        *(
            (
                lambda llm, prompt=prompt: llm.generate(prompt),
                "a prompt must be a string or a list of token ids, got ",
            )
            for prompt in ([[5.7, 6.2]], [[True]], b"abc", [["5"]], "a\ud800", [5, "a"], [5.5])
        ),
        (lambda llm: llm.stream(["a", "b"]), r"a prompt must be .*, got \['a', 'b'\]"),
        (lambda llm: llm.generate("a", SamplingParams(max_tokens=999)), "max_tokens is 999"),
        (lambda llm: llm.generate("a", SamplingParams(logprobs=99)), "logprobs must be 0 to"),
        (lambda llm: llm.chat(QUESTION, tools=[{}]), "tools require the option tool_call_parser"),
        (lambda llm: llm.chat(called("{")), "arguments of a call of 'f' must be an object"),
        (
            lambda llm: llm.chat(called('{"x": NaN}')),
            "arguments of a call of 'f' must be an object",
        ),
        (lambda llm: llm.chat(called("[]")), "arguments of a call of 'f' must be an object"),
        (
            lambda llm: llm.chat(QUESTION, SamplingParams(structured_outputs={"regex": "a+"})),
            'structured output is off; create the LLM with grammar_backend="llguidance"',
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}]),
            "a part of type 'image_url', and LLM supports only text",
        ),
    ],
)
def test_llm_rejects_invalid_calls(llm, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(llm)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": 3}, "temperature must be a number from 0 to 2, got 3"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"top_p": 0}, "top_p must be a number above 0 to 1, got 0"),
        ({"stop": [""]}, "stop must be a list of non-empty strings"),
        ({"stop": ["\ud800"]}, "stop must be a list of non-empty strings"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false, got 'yes'"),
        ({"structured_outputs": "x"}, "structured_outputs must have one of json, regex"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs must have one of json, regex"),
        (
            {"structured_outputs": {"choice": "yes"}},
            "structured_outputs: choice must be a list of strings, got 'yes'",
        ),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs: regex must be a string, got 5"),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs: json must be an object"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias must have numbers from -100 to 100"),
        ({"logit_bias": {5: 1000}}, "logit_bias must have numbers from -100 to 100"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must have token ids as its keys"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids must be a list of token ids"),
    ],
)
def test_sampling_params_reject_invalid_values(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"port": 8000}, "port is an option of the HTTP server"),
        ({"page_size": 3}, "page_size must be a power of two"),
        ({"pagesize": 16}, "did you mean page_size"),
        ({"speculative_num_steps": 3}, "speculative_num_steps requires a drafter"),
        ({"model_path": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_llm_rejects_invalid_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        LLM(**options)


def test_llm_logs_startup_only_at_log_level_info(capfd, caplog, monkeypatch):
    monkeypatch.setattr(progress, "SHORT_S", 0.0)
    with LLM(max_running_requests=1, context_length=64):
        assert (capfd.readouterr().err, caplog.text) == ("", "")
    with LLM(max_running_requests=1, context_length=64, log_level="info"):
        assert "Prepared " in caplog.text


def test_llm_rejects_server_only_options():
    for name in OF_A_SERVER:
        with pytest.raises(ConfigError, match=f"{name} is an option of the HTTP server"):
            LLM(**{name: True})


def test_structured_outputs_json_constrains_chat():
    form = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    asked = SamplingParams(temperature=1, seed=2, max_tokens=40, structured_outputs=form)
    with LLM(**OPTIONS) as llm:
        (answer,) = llm.chat(QUESTION, asked)
    assert answer.text.startswith("{")


def test_strict_tool_without_grammar_backend_raises(tmp_path):
    for file in DEFAULT_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}
    asked = SamplingParams(**GREEDY)
    needed = {"grammar_backend": "none", "tool_call_parser": "hermes"}
    with LLM(str(tmp_path), **needed, **OPTIONS) as llm:
        assert llm.chat(QUESTION, asked, tools=[tool])[0].text
        with pytest.raises(ValueError, match="structured output is off; create the LLM with"):
            llm.chat(QUESTION, asked, tools=[strict])


def test_generate_after_close_raises():
    llm = LLM(**OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="the engine has ended"):
        llm.generate("a")


def test_lora_selects_adapter_per_prompt():
    """Token ids alone: the golden checkpoint has no tokenizer."""
    golden = Path(__file__).parents[1] / "golden"
    paths = {"mine": golden / "qwen3_lora", "other": golden / "qwen3_lora_part"}
    want = dict(np.load(golden / "qwen3_lora" / "vectors.npz"))
    prompt = want["short_ids"].tolist()
    first = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
    with LLM(model_path=golden / "qwen3", lora_paths=paths, **WITHOUT, **OPTIONS) as it:
        params = [SamplingParams(**first, lora=name) for name in ("mine", None, "other")]
        found = [each.outputs[0].token_ids[0] for each in it.generate([prompt] * 3, params)]
        with pytest.raises(ValueError, match=r"lora must be a name in the option lora_paths"):
            it.generate([prompt], SamplingParams(**first, lora="third"))
    last = [np.load(golden / x / "vectors.npz") for x in ("qwen3_lora", "qwen3", "qwen3_lora_part")]
    assert found == [int(each["short_logits"][-1].argmax()) for each in last]
