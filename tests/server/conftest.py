"""The server that most tests of HTTP ask; a file that needs another one has its own."""

from collections.abc import Iterator

import pytest

from tests.support.http_fixtures import Server, save_tokenizer, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """The engine without a model, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    with serving(["-m", "tests.support.http_fixtures", str(folder)]) as running:
        yield running
