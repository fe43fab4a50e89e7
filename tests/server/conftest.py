"""Default server of the HTTP tests; files with other requirements define their own fixture."""

from collections.abc import Iterator

import pytest

from tests.support.http_fixtures import Server, save_tokenizer, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """Starts a server with the model-free test engine and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    with serving(["-m", "tests.support.http_fixtures", str(folder)]) as running:
        yield running
