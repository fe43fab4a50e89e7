"""Draft heads published on the hub, by target model."""

from collections.abc import Iterator
from pathlib import Path

from shared.models.hub import Repository, cached_folder

HEADS = {
    "Qwen/Qwen3-4B": ("AngelSlim/Qwen3-4B_eagle3", "z-lab/Qwen3-4B-DFlash-b16"),
    "Qwen/Qwen3-8B": (
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        "AngelSlim/Qwen3-8B_eagle3",
        "Tengyunw/qwen3_8b_eagle3",
        "z-lab/Qwen3-8B-DFlash-b16",
    ),
    "Qwen/Qwen3-14B": ("RedHatAI/Qwen3-14B-speculator.eagle3", "AngelSlim/Qwen3-14B_eagle3"),
    "Qwen/Qwen3-32B": ("RedHatAI/Qwen3-32B-speculator.eagle3", "AngelSlim/Qwen3-32B_eagle3"),
    "Qwen/Qwen3-30B-A3B": ("RedHatAI/Qwen3-30B-A3B-speculator.eagle3",),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ),
    "meta-llama/Llama-3.3-70B-Instruct": ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",),
}
"""Heads of each model in order of preference.

EAGLE-3 comes before DFlash: with Qwen3-8B on an H200 (torch) it reached 1.89 times the tokens per
second of plain decoding, DFlash 1.64 times (docs/performance.md).
"""


def cached_head(model: Path, download_dir: str | None) -> tuple[str, Path] | None:
    """Finds a published head of a model in the hub's local cache, without network access.

    Args:
      model: The model's folder: a snapshot in a cache, or any folder with the model's name.
      download_dir: The cache; None for the default one of the environment.

    Returns:
      The head's hub id and folder; None if none is cached with safetensors weights.
    """
    for repo_id in _heads_of(model):
        if folder := cached_folder(repo_id, None, download_dir):
            return repo_id, folder
    return None


def _heads_of(model: Path) -> Iterator[str]:
    snapshot = Repository.of_snapshot(model.absolute())
    for repo_id, heads in HEADS.items():
        is_named = repo_id.partition("/")[2] == model.name
        if is_named if snapshot is None else snapshot.repo_id == repo_id:
            yield from heads
