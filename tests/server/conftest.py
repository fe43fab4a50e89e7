"""Default server of the HTTP tests, one for all files; others define a fixture of their own."""

from collections.abc import Iterator

import pytest

from tests.support.http_fixtures import Server, save_tokenizer, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """Starts a server with the model-free test engine and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    with serving(["-m", "tests.support.http_fixtures", str(folder)]) as running:
        yield running
