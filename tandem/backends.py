"""The two backends, and the one that is used where none is named."""

from importlib.util import find_spec

BACKENDS = ("torch", "jax")
"""Each has the name of its framework's module."""


def default() -> str:
    """Returns the backend whose framework is installed; torch if both are, or neither."""
    return "jax" if find_spec("torch") is None and find_spec("jax") is not None else "torch"


def fault(backend: str) -> str | None:
    """Returns the sentence for a backend whose framework is not installed."""
    if find_spec(backend) is not None:
        return None
    return (
        f"the {backend} backend needs {backend}, which is not installed. "
        f'Install the extra `{backend}`: pip install "tandem-llm[{backend}]"'
    )
