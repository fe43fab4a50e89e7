"""Locations of the models of a server: a folder, the local hub cache, or the hub.

Nothing is downloaded and no library is imported, so a wrong path is reported at once.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from shared.models.file_kind import CONFIG_FILE, TOKENIZER_FILE, folder_fault
from shared.models.hub import (
    DEFAULT_REVISION,
    Hub,
    HubError,
    Repository,
    is_complete,
    offline_fault,
)
from shared.options.flags import ConfigError, spelling
from shared.options.options import Options

TARGET, DRAFT = "model_path", "speculative_draft_model_path"
REVISIONS = {TARGET: "revision", DRAFT: "speculative_draft_model_revision"}
"""Options that name a model, each with the option of its revision."""

PARTS = {TARGET: "the model folder", DRAFT: "the draft model folder"}
"""Description of the folders in messages."""


def find_models(options: Options) -> dict[str, "ModelPlace"]:
    """Locates the models in the options, without network access.

    Raises:
      ValueError: A model is neither local nor, by its name, on the hub.
    """
    hub = Hub.of_environment(options.model.download_dir)
    places = {field: place for field in REVISIONS if (place := _place(options, field, hub))}
    if options.model.download_dir and not any(each.repository for each in places.values()):
        raise ConfigError("--download-dir requires a model given by its hub id; remove the flag")
    for field, place in places.items():
        if place.path is not None and (fault := folder_fault(place.path, PARTS[field])):
            raise ConfigError(fault)
        if place.path is None and place.repository is not None and hub.is_offline:
            raise HubError(offline_fault(hub, place.repository))
    return places


@dataclass(frozen=True)
class ModelPlace:
    """Location of a model.

    Attributes:
      path: Its local folder; None if it must be downloaded.
      repository: Its repository on the hub; None for a folder.
    """

    path: Path | None
    repository: Repository | None

    @property
    def served_name(self) -> str | None:
        """Hub id; None for a folder that is not a snapshot of the cache."""
        known = self.repository or (Repository.of_snapshot(self.path) if self.path else None)
        return None if known is None else known.repo_id


def _place(options: Options, field: str, hub: Hub) -> ModelPlace | None:
    """Locates a model without network access; returns None if the option is not set.

    Raises:
      ConfigError: There is no such folder, and the value is not a hub id.
    """
    given, revision = _values(options, field)
    if given is None:
        if revision is not None:
            raise ConfigError(
                f"{spelling(REVISIONS[field])} requires a hub id as {spelling(field)}; "
                "give one, or remove the flag"
            )
        return None
    path = Path(os.path.expanduser(given))
    if repository := Repository.of_folder(path.absolute(), revision):  # the root of a cached model
        return ModelPlace(_snapshot(repository, path.absolute().parent), repository)
    if os.path.lexists(path):
        if revision is not None:
            raise ConfigError(
                f"{spelling(REVISIONS[field])} requires a hub id, and {given} is a folder;"
                " remove the flag"
            )
        return ModelPlace(path.absolute(), None)
    repository = Repository.of_id(given, revision)
    if repository is None:
        raise ConfigError(_absent(given, path, field))
    return ModelPlace(_cached(options, field, repository, hub), repository)


def _absent(given: str, path: Path, field: str) -> str:
    scheme, is_address, after = given.partition("://")
    if is_address:
        parts = after.split("/")[scheme.startswith("http") :]  # a web address has a host
        return (
            f"{spelling(field)} {given} is a URL; give a folder, or the hub id "
            f"{'/'.join(parts[:2])}"
        )
    return (
        f"{PARTS[field]} {path.absolute()} does not exist; give a folder, or a hub id as ORG/NAME"
    )


def _snapshot(repository: Repository, cache: Path) -> Path:
    """Returns the commit folder of a cached model that is given by its root folder.

    Raises:
      HubError: The cache has no such revision.
    """
    commit = repository.cached_commit(cache)
    folders = sorted(path for path in (repository.folder(cache) / "snapshots").iterdir())
    if commit is None and repository.revision == DEFAULT_REVISION and len(folders) == 1:
        return folders[0]
    if commit is None or not repository.snapshot(cache, commit).is_dir():
        raise HubError(
            f"{repository.folder(cache)} has no revision {repository.revision}; give one "
            f"of the folders in snapshots, or the hub id {repository.repo_id}"
        )
    return repository.snapshot(cache, commit)


def _cached(options: Options, field: str, repository: Repository, hub: Hub) -> Path | None:
    """Returns the folder of a completely cached model, or None."""
    commit = repository.cached_commit(hub.cache)
    folder = None if commit is None else repository.snapshot(hub.cache, commit)
    if folder is None or not (folder / CONFIG_FILE).is_file():
        return None
    if options.model.is_dummy:
        return folder
    marks = (folder / TOKENIZER_FILE, repository.absence(hub.cache, folder.name))
    may_lack = field != TARGET or hub.is_offline or any(mark.exists() for mark in marks)
    return folder if may_lack and is_complete(folder) else None


def _values(options: Options, field: str) -> tuple[str | None, str | None]:
    """Returns the path and the revision of a model."""
    part = options.model if field == TARGET else options.speculative
    return getattr(part, field), getattr(part, REVISIONS[field])
