"""`--speculative-algorithm auto`: MTP layer, else a published head of the cache, else none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from shared.drafts.published import HEADS, cached_head
from shared.models.checkpoint import SINGLE_FILE, open_checkpoint
from shared.models.hub import Repository
from shared.options.command_line import parse
from shared.options.options import Options
from shared.process.model_check import check_model
from tests.support.tiny_assistants import write_tiny_assistant
from tests.support.tiny_models import tiny_model, write_tiny

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
AUTO = "--speculative-algorithm=auto"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def checked(*flags: str) -> Options:
    return check_model(parse([*flags, "--tool-call-parser=none"]), open_checkpoint).options


def into_cache(cache: Path, repo_id: str, source: Path) -> Path:
    """Puts a folder into a hub cache as the main revision of a repository."""
    repository = Repository(repo_id, "main").folder(cache)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(source, repository / "snapshots" / COMMIT))


def test_algorithm_auto_chooses_mtp_layer():
    options = checked(AUTO)
    assert options.speculative.speculative_algorithm == "NEXTN"
    assert options.reasons == ("--speculative-algorithm NEXTN: the checkpoint has an MTP layer",)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("eagle3", "EAGLE3"), ("eagle", "EAGLE"), ("dflash", "DFLASH"), ("standalone", "STANDALONE")],
)
def test_algorithm_auto_detects_kind_of_given_draft_model(folder: str, name: str):
    options = checked(AUTO, "--speculative-draft-model-path", str(DEMO / folder))
    assert options.speculative.speculative_algorithm == name
    assert options.reasons[0].startswith(f"--speculative-algorithm {name}: kind of the draft model")


def test_mtp_tensors_decide_where_config_names_layer(tmp_path: Path):
    write_tiny(tmp_path, "glm4_moe", 0)
    model = ("--model-path", str(tmp_path))
    assert checked(AUTO, *model).speculative.speculative_algorithm == "NEXTN"
    tensors = load_file(tmp_path / SINGLE_FILE)
    kept = {name: x for name, x in tensors.items() if not name.startswith("model.layers.3.")}
    save_file(kept, tmp_path / SINGLE_FILE)
    assert not checked(AUTO, *model).speculative.drafts
    with pytest.raises(ValueError, match=r"no layers\.3\.\* tensors.*use a checkpoint with"):
        checked("--speculative-algorithm=NEXTN", *model)


def test_algorithm_auto_without_drafter_uses_plain_decoding():
    options = checked(AUTO, "--model-path", str(DEMO / "standalone"))
    assert not options.speculative.drafts
    assert options.reasons[0].startswith("--speculative-algorithm none: the checkpoint has no MTP")
    for flag in ("--speculative-num-steps=3", "--speculative-adaptive"):
        with pytest.raises(ValueError, match="auto found no drafter: the checkpoint has no MTP"):
            checked(AUTO, flag, "--model-path", str(DEMO / "standalone"))


def test_algorithm_auto_chooses_cached_published_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    # A head of another target: its sizes are not checked here.
    heads = {"org/target": ("maker/absent", "maker/head"), "org/other": ("maker/other",)}
    monkeypatch.setattr("shared.drafts.published.HEADS", heads)
    head = into_cache(tmp_path / "hub", "maker/head", DEMO / "eagle3")
    model = into_cache(tmp_path / "hub", "org/target", DEMO / "standalone")
    assert cached_head(model, None) == ("maker/head", head)
    assert cached_head(DEMO / "target", None) == ("maker/head", head)  # by its name
    assert cached_head(DEMO / "standalone", None) is None
    assert cached_head(model, str(tmp_path / "empty")) is None
    monkeypatch.setattr("shared.process.model_check.refusals", lambda setup: [])
    with pytest.raises(ValueError, match="draft"):  # its sizes match another target
        checked(AUTO, "--model-path", str(model))


def test_cached_head_ignores_pickled_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("shared.drafts.published.HEADS", {"org/target": ("maker/head",)})
    folder = into_cache(tmp_path, "maker/head", DEMO / "eagle3")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert cached_head(DEMO / "target", None) is None


def test_published_heads_have_valid_hub_ids():
    for target, heads in HEADS.items():
        for repo_id in (target, *heads):
            assert Repository(repo_id, "main").repo_id == repo_id


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Gemma 4 and of its assistant."""
    folder = tmp_path_factory.mktemp("gemma4")
    write_tiny(folder / "model", "gemma4", 0)
    write_tiny_assistant(folder / "draft", *tiny_model("gemma4", 0), 1)
    return folder


def with_assistant(algorithm: str, model: Path, draft: Path) -> Options:
    paths = f"--model-path={model}", f"--speculative-draft-model-path={draft}"
    return checked(f"--speculative-algorithm={algorithm}", *paths)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NEXTN", "ASSISTANT"),
        ("gemma4_mtp", "ASSISTANT"),
        ("NEXTN+NGRAM", "ASSISTANT+NGRAM"),
        ("auto", "ASSISTANT"),
        ("ASSISTANT", "ASSISTANT"),
    ],
)
def test_algorithm_of_assistant_folder(given: str, name: str, gemma4: Path):
    options = with_assistant(given, gemma4 / "model", gemma4 / "draft")
    assert options.speculative.speculative_algorithm == name
    reasons = [reason for reason in options.reasons if name in reason]
    assert bool(reasons) == (given != name)


def test_assistant_of_other_target_raises(gemma4: Path):
    with pytest.raises(ValueError, match=r"backbone_hidden_size \(48\) is not the target's"):
        with_assistant("NEXTN", DEMO / "target", gemma4 / "draft")
