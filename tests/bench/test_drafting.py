"""Drafter names of benchmarks, which are those of the server's flags."""

import pytest

from bench.common.draft_config import Draft, named_folder


def test_draft_parse_accepts_every_algorithm_spelling():
    assert str(Draft.parse("mtp:S=3")) == "NEXTN S=3"
    assert str(Draft.parse("n-gram")) == "NGRAM"
    assert str(Draft.parse("none")) == str(Draft.parse("off")) == "none"
    with pytest.raises(ValueError, match="did you mean EAGLE3"):
        Draft.parse("eagel3:S=5")


def test_named_folder_accepts_every_algorithm_spelling():
    assert named_folder("eagle-3=/heads/eagle3")[0] == "EAGLE3"
    with pytest.raises(ValueError, match="give ALGORITHM=DIR"):
        named_folder("mtp=/heads/mtp")
