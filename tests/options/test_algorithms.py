"""Names of speculative algorithms in the spellings of this server and of its peers."""

import pytest

from shared.options.algorithms import KNOWN_ALGORITHMS, algorithm_of
from shared.options.command_line import parse
from shared.options.flags import ConfigError

SPELLINGS = {
    "NEXTN": ["nextn", "NextN", "mtp", "MTP", "deepseek_mtp", "qwen3_next_mtp", "draft-mtp"],
    "EAGLE": ["eagle", "Eagle"],
    "EAGLE3": ["eagle3", "eagle-3", "Eagle3", "draft-eagle3"],
    "NAIVE_EAGLE": ["naive_eagle", "naive-eagle", "NaiveEagle"],
    "STANDALONE": ["standalone", "draft_model", "DraftTarget", "draft-simple"],
    "NGRAM": ["ngram", "NGram", "n-gram", "prompt_lookup"],
    "DFLASH": ["dflash", "DFlash"],
    "DFLASH2": ["dflash2"],
    "DSPARK": ["dspark"],
    "ASSISTANT": ["assistant", "frozen_kv_mtp", "FROZEN-KV-MTP"],
    "NEXTN+NGRAM": ["nextn+ngram", "mtp+ngram"],
    "EAGLE3+NGRAM": ["eagle3+n-gram"],
}
UNKNOWN = {
    "eagel3": "did you mean EAGLE3",
    "nxtn": "did you mean NEXTN",
    "dflsh": "did you mean DFLASH",
    "mpt": "did you mean NEXTN",
    "nextn+ngrm": r"did you mean NEXTN\+NGRAM",
    "medusa": "must be one of NEXTN",
    "ngram+nextn": "must be one of NEXTN",
}


@pytest.mark.parametrize("name", [*KNOWN_ALGORITHMS, *SPELLINGS])
def test_algorithm_of_accepts_all_spellings(name: str):
    for spelling in [name, name.lower(), *SPELLINGS.get(name, [])]:
        assert algorithm_of(spelling) == name
        options = parse(["--speculative-algorithm", spelling])
        assert options.speculative.speculative_algorithm == name


@pytest.mark.parametrize("name", UNKNOWN)
def test_algorithm_of_unknown_name_suggests_nearest(name: str):
    for read in (algorithm_of, lambda text: parse([f"--speculative-algo={text}"])):
        with pytest.raises(ConfigError, match=UNKNOWN[name]):
            read(name)


def test_algorithm_none_disables_drafts():
    for name in ("none", "NONE", "off"):
        assert not parse(["--speculative-algorithm", name]).speculative.drafts
    with pytest.raises(ConfigError, match="--speculative-num-steps requires a drafter"):
        parse(["--speculative-algorithm", "none", "--speculative-num-steps", "3"])
