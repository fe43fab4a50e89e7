"""Images over HTTP: placeholders and pixels reach the engine, and invalid images return 400.

The model-free test engine repeats the prompt, with the red value of an image's first pixel instead
of its first image token.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    IMAGE,
    IMAGES,
    POOL_TOKENS,
    SLOW,
    SPECIAL,
    Server,
    save_tokenizer,
    serving,
)
from tests.support.images import REFUSED, rgb, stored, url_of
from tests.support.tiny_models import write_tiny

TEMPLATE = """
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' %}
{%- if m.role == 'system' %}{{ raise_exception('no images of the system') }}{% endif %}
{{- '' if blind else '(<|image|>)' }}
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}
{%- for t in tools or [] %}{{ t.function.name }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SIDE = IMAGES.multiple
GEMMA_VISION: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gemma3": (
        {"vision_config": {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 256},
        ("vision_tower.vision_model.head", "multi_modal_projector.mm_soft_emb_norm"),
    ),
    "gemma4": (
        {
            "vision_config": {"model_type": "gemma4_vision"},
            "audio_config": {"model_type": "gemma4_audio"},
            "vision_soft_tokens_per_image": 280,
        },
        (
            *("model.vision_tower.patch_embedder.input_proj", "model.embed_audio.projection"),
            *("model.embed_vision.embedding_projection", "model.audio_tower.layers.0.norm_out"),
        ),
    ),
}
"""Fields of models with vision encoders, and names of tensors that text does not need."""

USER, ASSISTANT, NAME = 257, 258, SPECIAL[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(["-m", "tests.support.http_fixtures", str(folder), "--sees"]) as running:
        yield running


def image(red: int, rows: int, columns: int) -> dict[str, Any]:
    """Returns a content part with a red image of this many rows and columns of tokens."""
    pixels = np.full((rows * SIDE, columns * SIDE, 3), (red, 0, 0), np.uint8)
    return {"type": "image_url", "image_url": {"url": url_of(stored(rgb(pixels)))}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def asked(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, messages=messages, temperature=0, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: Server, content: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, messages=[{"role": "user", "content": content}], **fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


TALK = [
    user(text("a"), image(7, 2, 3), text("b"), image(9, 1, 1), text("c")),
    {"role": "assistant", "content": "d"},
    user(image(11, 3, 1), text("e")),
]
EXPANDED = [
    *(USER, *b"a(", *[IMAGE] * 6, *b")b(", IMAGE, *b")c", ASSISTANT, *b"d"),
    *(USER, *b"(", *[IMAGE] * 3, *b")e", ASSISTANT),
]


def test_tokenize_preserves_order_of_image_parts(server):
    tokens = server.post("/tokenize", messages=TALK).json()
    assert (tokens["tokens"], tokens["count"]) == (EXPANDED, len(EXPANDED))


def test_image_pixels_reach_engine_at_placeholder_positions(server):
    answer = asked(server, TALK, max_tokens=len(EXPANDED), n=2, return_token_ids=True)
    reds = iter([7, 9, 11])
    begins = [a != IMAGE and b == IMAGE for a, b in zip([0, *EXPANDED], EXPANDED, strict=False)]
    want = [next(reds) if begin else t for begin, t in zip(begins, EXPANDED, strict=True)]
    assert [choice["token_ids"] for choice in answer["choices"]] == [want] * 2


def test_usage_and_metrics_count_image_tokens(server):
    before = server.metrics()["tandem:prompt_image_tokens_total"]
    usage = asked(server, TALK, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(EXPANDED)
    assert usage["prompt_tokens_details"]["image_tokens"] == 10
    assert server.metrics()["tandem:prompt_image_tokens_total"] == before + 10
    assert asked(server, [user(text("a"))], max_tokens=1)["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "image_tokens": 0,
    }


def test_tool_messages_may_contain_images(server):
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        user(text("look")),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [image(5, 1, 2)]},
    ]
    answer = server.post("/tokenize", messages=messages, tools=[tool])
    assert answer.json()["tokens"].count(IMAGE) == 2


def test_image_limits_are_reported_and_enforced(server):
    capabilities = httpx.get(server.url + "/capabilities").json()
    images, limits = capabilities["images"], capabilities["limits"]
    assert (limits["max_image_tokens"], limits["image_token"]) == (64, IMAGE)
    assert images["pixels_per_token"] == SIDE**2
    large = asked(server, [user(image(1, 30, 30))], max_tokens=1)["usage"]
    assert large["prompt_tokens_details"]["image_tokens"] <= limits["max_image_tokens"]
    many = refused(server, [image(1, 1, 1)] * (images["max_images"] + 1))
    assert f"at most {images['max_images']} are supported" in many["message"]
    seven = refused(server, [image(1, 8, 8)] * 7, max_tokens=1)
    assert seven["code"] == "context_length_exceeded"
    assert f"the {POOL_TOKENS} tokens" in seven["message"]


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ([{"type": "video_url", "video_url": {"url": "x"}}], "messages[0].content", "video is not"),
        ([{"type": "input_audio", "input_audio": {}}], "messages[0].content", "audio is not"),
        ([{"type": "file", "file": {}}], "messages[0].content", "files are not supported"),
        ([{"type": "input_image"}], "messages[0].content", "type image_url"),
        (
            [{"type": "image_url", "image_url": 5}],
            "messages[0].content",
            "neither a URL nor an obj",
        ),
        (
            [{"type": "image_url", "image_url": "http://x"}],
            "messages[0].content[0].image_url",
            "URLs are not fetched",
        ),
        ([image(1, 1, 1) | {"more": 1}], "messages[0].content", "text or image_url"),
        ([text("a"), text(f"the name {NAME}")], "messages", "the placeholder of images; remove it"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_content_part_returns_400_with_param(server, content, param, words):
    error = refused(server, content)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("detail", ["auto", "high", "original", None])
def test_image_detail_other_than_low_preserves_size(server, detail):
    part = image(1, 2, 3)
    want = image_tokens(server, part)
    part["image_url"]["detail"] = detail
    assert image_tokens(server, part) == want == 6


def test_image_detail_rejects_unknown_value(server):
    part = image(1, 1, 1)
    part["image_url"]["detail"] = "tiny"
    assert "give one of auto, high, original, low" in refused(server, [part])["message"]


def image_tokens(server: Server, part: dict[str, Any]) -> int:
    usage = asked(server, [user(part)], max_tokens=1)["usage"]
    return usage["prompt_tokens_details"]["image_tokens"]


def test_image_url_accepts_string_and_wrapped_base64(server):
    part = image(1, 2, 3)
    head, data = part["image_url"]["url"].split(",")
    lines = base64.encodebytes(base64.b64decode(data)).decode()
    assert image_tokens(server, {"type": "image_url", "image_url": f"{head},{lines}"}) == 6


def test_too_many_images_rejected_before_template_and_decoding(server):
    """Each image is also invalid on its own."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png,"}}
    system = {"role": "system", "content": [part]}  # the template rejects images of the system
    answer = server.post(CHAT, messages=[system, user(*[part] * 10_000)])
    assert answer.status_code == 400
    assert "10001 images, at most 64 are supported" in answer.json()["error"]["message"]


def test_images_rejected_in_assistant_and_system_messages(server):
    part = image(1, 1, 1)
    answer = server.post(CHAT, messages=[{"role": "assistant", "content": [part]}])
    assert answer.status_code == 400
    assert "images are supported in messages of role user" in answer.json()["error"]["message"]
    answer = server.post(CHAT, messages=[{"role": "system", "content": [part]}])
    assert answer.status_code == 400  # raised by the template
    assert "no images of the system" in answer.json()["error"]["message"]


def stream(server: Server, arrivals: list[float], started: threading.Event) -> None:
    """Streams a slow request and records the arrival time of each event."""
    body = {"prompt": [SLOW, 97], "max_tokens": 200, "stream": True, "temperature": 0}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
                started.set()


def test_invalid_images_return_400_without_blocking_stream(server):
    arrivals: list[float] = []
    started = threading.Event()
    with ThreadPoolExecutor(1 + len(REFUSED)) as pool:
        neighbour = pool.submit(stream, server, arrivals, started)
        started.wait(30)
        sent = [
            pool.submit(
                refused, server, [text("a"), {"type": "image_url", "image_url": {"url": u}}]
            )
            for u, _ in REFUSED.values()
        ]
        errors = [each.result(60) for each in sent]
        answered = time.monotonic()
        neighbour.result(60)
    for error, (_, words) in zip(errors, REFUSED.values(), strict=True):
        assert error["param"] == "messages[0].content[1].image_url"
        assert words in error["message"]
    # Some of its 70 events, 20 ms apart, arrived before the last error response.
    assert sum(at < answered for at in arrivals) > 1


def workers(server: Server) -> list[int]:
    """Returns the pids of the image worker processes."""
    _, child = server.pids()
    children = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [int(pid) for pid, line in lines.items() if "shared.images.worker" in line]


def test_stopped_image_workers_block_only_image_requests(server):
    """Text requests finish while all image workers are stopped, independent of time."""
    asked(server, [user(image(1, 1, 1))], max_tokens=1)
    stopped = workers(server)
    with ThreadPoolExecutor(1) as pool:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            waiting = pool.submit(asked, server, [user(image(2, 1, 1))], max_tokens=1)
            for _ in range(2):
                asked(server, [user(text("a"))], max_tokens=9)
            assert not waiting.done()
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert waiting.result(30)["usage"]["prompt_tokens_details"]["image_tokens"] == 1


def test_killed_image_worker_is_reported_and_restarted(server):
    asked(server, [user(image(1, 1, 1))], max_tokens=1)
    (first, *others) = workers(server)
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refused, server, [image(1, 1, 1)])
        for _ in range(2):
            asked(server, [user(text("a"))], max_tokens=9)
        os.kill(first, signal.SIGKILL)
        assert "the image process exited" in waiting.result(30)["message"]
    asked(server, [user(image(3, 1, 1))], max_tokens=1)
    assert any("image process exited" in line for line in server.lines)


def test_text_model_rejects_images_and_starts_no_worker(tmp_path):
    save_tokenizer(tmp_path)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as blind:
        error = refused(blind, [text("a"), image(1, 1, 1)])
        assert error["param"] == "messages[0].content[1].image_url"
        assert "does not support image input; send text only" in error["message"]
        assert httpx.get(blind.url + "/capabilities").json()["images"] is None
        assert not workers(blind)
        value = [text(f"the name {NAME}")]
        assert json.dumps(asked(blind, [user(*value)], max_tokens=3))


def test_template_omitting_image_placeholder_returns_400(server):
    error = refused(server, [image(1, 1, 1)], chat_template_kwargs={"blind": True})
    assert error["param"] == "messages"
    assert "wrote 0 image placeholders for 1 images" in error["message"]


def test_template_without_image_placeholders_returns_400(tmp_path):
    save_tokenizer(tmp_path)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path), "--sees"]) as server:
        error = refused(server, [text("a"), image(1, 1, 1)])
    assert error["param"] == "messages"
    assert "without image placeholders" in error["message"]


@pytest.mark.parametrize("name", GEMMA_VISION)
def test_gemma_with_vision_encoder_serves_text_alone(name, tmp_path):
    write_tiny(tmp_path, name, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    outer, names = GEMMA_VISION[name]
    outer |= {"architectures": [f"{name.title()}ForConditionalGeneration"], "model_type": name}
    outer |= {"tie_word_embeddings": False, "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    file = tmp_path / "model.safetensors"
    vision = {f"{each}.weight": np.zeros(2, np.float32) for each in names}
    text_model = {
        f"language_model.{each.removeprefix('language_model.')}": tensor
        for each, tensor in load_file(file).items()
    }
    save_file(text_model | vision, file)
    save_tokenizer(tmp_path)
    command = ["-m", "tests.support.serve_reference", "--model-path", str(tmp_path), "--port", "0"]
    with serving(command) as gemma:
        error = refused(gemma, [text("a"), image(1, 1, 1)])
        assert error["message"] == (
            "messages[0].content[1].image_url is an image, and the served model does not support "
            "image input; send text only"
        )
        assert asked(gemma, [user(text("a"))], max_tokens=2)["usage"]["completion_tokens"] == 2
