"""Parameters in Python have the bounds that they have over HTTP."""

from shared.offline.params import BOUNDS, SamplingParams
from shared.server.openai_types import CompletionRequest


def test_bounds_are_those_of_the_http_routes():
    document = CompletionRequest.model_json_schema()
    parts = [*document["$defs"].values(), document]  # most drafts are a field of a part
    schema = {name: field for part in parts for name, field in part.get("properties", {}).items()}
    found = {}
    for name in BOUNDS:
        kind = schema[name].get("anyOf", [schema[name]])[0]
        found[name] = (kind.get("minimum", kind.get("exclusiveMinimum")), kind["maximum"])
        is_open = "exclusiveMinimum" in kind
        for value, is_in in ((found[name][0], not is_open), (found[name][1], True)):
            try:
                SamplingParams(**{name: value})
            except ValueError:
                assert not is_in, (name, value)
            else:
                assert is_in, (name, value)
    assert found == BOUNDS
