"""Model repositories of the Hugging Face hub, and their snapshots in the local cache."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.models.file_kind import TOKENIZER_FILE
from shared.models.weight_files import CheckpointError, weight_files

DEFAULT_REVISION = "main"
DEFAULT_ENDPOINT = "https://huggingface.co"
TRUE_WORDS = {"1", "on", "yes", "true"}
"""Values of an environment variable that switch it on, in any case."""

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_SEPARATORS = re.compile(r"--|\.\.")
"""Substrings that a hub id must not contain: `--` replaces the slash in folder names."""

REVISION = re.compile(r"[\w][\w.+-]*(/[\w][\w.+-]*)*")
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(ValueError):
    """A model of the hub cannot be read; the message says what to do."""


@dataclass(frozen=True)
class Hub:
    """The hub and its local cache, as the environment defines them at startup.

    Attributes:
      endpoint: Address of the hub, from HF_ENDPOINT.
      cache: Folder of the cache: `--download-dir`, else HF_HUB_CACHE, else `hub` in HF_HOME.
      is_offline: True if HF_HUB_OFFLINE is set: only the cache is read.
    """

    endpoint: str
    cache: Path
    is_offline: bool

    @classmethod
    def of_environment(cls, download_dir: str | Path | None) -> Self:
        """Reads the variables that `huggingface_hub` documents.

        The library reads them once, when it is imported. This function also reads variables that a
        notebook sets later.
        """
        given = os.environ
        home = given.get("HF_HOME") or f"{given.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        named = given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
        offline = given.get("HF_HUB_OFFLINE") or given.get("TRANSFORMERS_OFFLINE") or ""
        cache = os.path.expanduser(os.path.expandvars(str(download_dir or named)))
        return cls(
            endpoint=(given.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"),
            cache=Path(cache).absolute(),
            is_offline=offline.lower() in TRUE_WORDS,
        )


@dataclass(frozen=True)
class Repository:
    """A model repository of the hub at one revision.

    Attributes:
      repo_id: `ORG/NAME`.
      revision: A branch, a tag or a commit.
    """

    repo_id: str
    revision: str

    def __post_init__(self) -> None:
        if not REPO_ID.fullmatch(self.repo_id) or _SEPARATORS.search(self.repo_id):
            raise HubError(f"{self.repo_id} is not a hub id; give ORG/NAME or ORG/NAME@REVISION")
        if not REVISION.fullmatch(self.revision) or ".." in self.revision:
            raise HubError(
                f"the revision {self.revision!r} of {self.repo_id} is invalid; give a branch, a "
                "tag or a commit"
            )

    def __str__(self) -> str:
        is_default = self.revision == DEFAULT_REVISION
        return self.repo_id if is_default else f"{self.repo_id}@{self.revision}"

    @classmethod
    def of_id(cls, given: str, revision: str | None) -> Self | None:
        """Parses `ORG/NAME` or `ORG/NAME@REVISION`; returns None if a string is not a hub id.

        Args:
          given: The string.
          revision: Revision from a flag.

        Raises:
          HubError: Two different revisions are given, or one is invalid.
        """
        repo_id, _, stated = given.partition("@")
        if not REPO_ID.fullmatch(repo_id) or _SEPARATORS.search(repo_id):
            return None
        if stated and revision not in (None, stated):
            raise HubError(
                f"{given} has the revision {stated}, but the flag has {revision}; give one of them"
            )
        if "@" in given and not stated:
            raise HubError(f"{given} has no revision after @; leave @ out")
        return cls(repo_id, stated or revision or DEFAULT_REVISION)

    @classmethod
    def of_folder(cls, folder: Path, revision: str | None) -> Self | None:
        """Returns the repository of a folder in a cache; None if it is not such a folder."""
        kind, _, repo_id = folder.name.partition("--")
        if kind != "models" or not (folder / "snapshots").is_dir():
            return None
        return cls.of_id(repo_id.replace("--", "/", 1), revision)

    @classmethod
    def of_snapshot(cls, folder: Path) -> Self | None:
        """Returns the repository and commit of a snapshot's folder; None for any other folder."""
        if folder.parent.name != "snapshots" or not COMMIT.fullmatch(folder.name):
            return None
        return cls.of_folder(folder.parent.parent, folder.name)

    def folder(self, cache: Path) -> Path:
        """Returns the folder of all its revisions in a cache."""
        return cache / f"models--{self.repo_id.replace('/', '--')}"

    def cached_commit(self, cache: Path) -> str | None:
        """Returns the commit of the revision at its last download; None if it was never
        downloaded.
        """
        if COMMIT.fullmatch(self.revision):
            return self.revision
        try:
            commit = (self.folder(cache) / "refs" / self.revision).read_text().strip()
        except OSError:
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def snapshot(self, cache: Path, commit: str) -> Path:
        """Returns the folder of one commit in a cache, which may not exist."""
        return self.folder(cache) / "snapshots" / commit

    def absence(self, cache: Path, commit: str) -> Path:
        """Returns the marker file for a commit without tokenizer.json, as the library marks absent
        files.
        """
        return self.folder(cache) / ".no_exist" / commit / TOKENIZER_FILE


def cached_folder(
    repo_id: str, revision: str | None = None, download_dir: str | Path | None = None
) -> Path | None:
    """Finds a model of the hub in the local cache, without any network access.

    Args:
      repo_id: `ORG/NAME`.
      revision: A branch, a tag or a commit; None: main.
      download_dir: The cache; None: the one that the environment names.

    Returns:
      The folder of its files; None where config.json or a file of weights is missing.

    Raises:
      HubError: The id or the revision is invalid.
    """
    repository = Repository(repo_id, revision or DEFAULT_REVISION)
    cache = Hub.of_environment(download_dir).cache
    commit = repository.cached_commit(cache)
    if commit is None:
        return None
    folder = repository.snapshot(cache, commit)
    return folder if is_complete(folder) else None


def is_complete(folder: Path) -> bool:
    """Returns True if a snapshot has its config.json and all weight files."""
    if not (folder / "config.json").is_file():
        return False
    try:
        weight_files(folder)
    except CheckpointError:
        return False
    return True


def offline_fault(hub: Hub, repository: Repository) -> str:
    """Describes a model that is not in the cache of an offline start."""
    return (
        f"there is no folder {repository.repo_id} here, HF_HUB_OFFLINE is set, and the cache "
        f"{hub.cache} has no complete copy of {repository}; unset it, or fill the cache with "
        f"`hf download {repository.repo_id}`"
    )
