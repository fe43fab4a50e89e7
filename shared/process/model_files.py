"""Model folders of a server: hub models are found in the local cache, or downloaded.

The settings of a hub model are downloaded first, then the headers of its weights. Invalid flags or
files end the startup there, before gigabytes are downloaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder
from shared.models.hub import Hub, Repository
from shared.models.hub_files import Snapshot, check_space
from shared.options.flags import ConfigError
from shared.options.options import DUMMY, Options
from shared.process import logs
from shared.process.model_check import check_model
from shared.process.model_places import DRAFT, TARGET, ModelPlace, find_models
from shared.process.progress import downloading_progress, size


def local_models(options: Options, places: Mapping[str, ModelPlace], console: Console) -> Options:
    """Replaces the models in the options by local folders.

    Args:
      options: Options of the command line.
      places: Locations of its models; see `shared.process.model_places.find_models`.
      console: Terminal for the progress of a download.

    Returns:
      The options with folders as paths, and with the hub id as the model name unless one is given.

    Raises:
      ValueError: A model cannot be downloaded or read, or is not supported with these options.
    """
    hub = Hub.of_environment(options.model.download_dir)
    found = {field: place.path for field, place in places.items() if place.path is not None}
    absent = {x: p.repository for x, p in places.items() if p.path is None and p.repository}
    if absent:
        found |= _downloaded(options, found, absent, hub, console)
    served = options.server.served_model_name or places[TARGET].served_name
    server = replace(options.server, served_model_name=served)
    return _with_paths(replace(options, server=server), found)


def settings_folder(given: str) -> Path:
    """Returns the folder of a model for reading settings and tokenizer, without downloading
    weights.

    Args:
      given: A folder, or a hub id.

    Raises:
      ValueError: See `find_models` and `local_models`.
    """
    options = Options.from_values({TARGET: given, "load_format": DUMMY})
    local = local_models(options, find_models(options), Console(quiet=True))
    return Path(local.model.model_path)


def _downloaded(
    options: Options,
    found: Mapping[str, Path],
    absent: Mapping[str, Repository],
    hub: Hub,
    console: Console,
) -> dict[str, Path]:
    """Downloads models, after checking flags and files with the headers of the weights only."""
    snapshots = {field: Snapshot(hub, repository) for field, repository in absent.items()}
    for snapshot in snapshots.values():
        logs.info(f"Reading {snapshot.source} into {hub.cache}")
        snapshot.download_settings()
    folders = {field: snapshot.folder for field, snapshot in snapshots.items()}
    if TARGET in folders:
        config_from_folder(folders[TARGET], options.model.context_length)
    if options.model.is_dummy:
        return folders
    with TemporaryDirectory(prefix="tandem-headers-") as scratch:
        _check_headers(options, found, snapshots, Path(scratch))
    num_bytes = sum(snapshot.missing_bytes for snapshot in snapshots.values())
    check_space(hub, num_bytes)
    if num_bytes:
        logs.report(f"Downloading {size(num_bytes)} of weights", total_bytes=num_bytes)
    with downloading_progress(console, num_bytes) as progress:
        for snapshot in snapshots.values():
            snapshot.download_weights(progress)
    return folders


def _check_headers(
    options: Options, found: Mapping[str, Path], snapshots: Mapping[str, Snapshot], scratch: Path
) -> None:
    """Checks a startup with weight files that contain only headers; messages name the hub models.

    Raises:
      ValueError: See `check_model`.
    """
    folders = {field: scratch / field for field in snapshots}
    for field, snapshot in snapshots.items():
        folders[field].mkdir()
        snapshot.write_headers(folders[field])
    try:
        check_model(_with_paths(options, {**found, **folders}), open_checkpoint)
    except ValueError as error:
        sentence = str(error)
        for field, folder in folders.items():
            sentence = sentence.replace(str(folder), str(snapshots[field]))
        raise ConfigError(sentence) from error


def _with_paths(options: Options, paths: Mapping[str, Path]) -> Options:
    """Replaces model paths in the options, and clears their revisions."""
    model, draft = options.model, options.speculative
    if TARGET in paths:
        model = replace(model, model_path=str(paths[TARGET]), revision=None)
    if DRAFT in paths:
        draft = replace(
            draft,
            speculative_draft_model_path=str(paths[DRAFT]),
            speculative_draft_model_revision=None,
        )
    return replace(options, model=model, speculative=draft)
