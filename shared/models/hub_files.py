"""Files of a hub repository: listing, reading of headers, and download into the local cache.

The cache has the layout of `huggingface_hub`, which other programs share. The files are written
here and not by the library, because the library restarts interrupted downloads from the beginning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shared.models.file_kind import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILE,
    fault_of_names,
)
from shared.models.hub import Hub, HubError, Repository
from shared.models.hub_client import RETRIES, HubClient, pause_s

SETTINGS = (
    CONFIG_FILE,
    INDEX_FILE,
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files other than weights that a startup reads."""

TEMPLATE = re.compile(r"additional_chat_templates/[\w-]+\.jinja")
WEIGHTS = re.compile(r"[\w-][\w.-]*\.safetensors")
BLOB = re.compile(r"[\w-]+")
SHA256 = re.compile(r"[0-9a-f]{64}")

HEADER_BYTES = 100_000
"""Bytes of the first request for a header: few headers are longer, and a second request takes
time."""

MOST_HEADER_BYTES = 100_000_000
MAPS = ("d2t", "t2d")
"""Tensors of a draft head that are checked by content, about 100 kB each."""

PARALLEL = 4
"""Maximum parallel downloads."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at one commit.

    Attributes:
      path: Path in the repository.
      size: Bytes; None if the hub does not list them.
      blob: Name in the cache, the SHA-256 of a large file; None like `size`.
    """

    path: str
    size: int | None
    blob: str | None

    @classmethod
    def of_sibling(cls, listed: Any) -> Self:
        """Creates the record of a file that the hub lists."""
        if listed.lfs is not None:
            return cls(listed.rfilename, listed.lfs.size, listed.lfs.sha256)
        blob = listed.blob_id if BLOB.fullmatch(listed.blob_id or "") else None
        return cls(listed.rfilename, listed.size, blob)

    @property
    def is_setting(self) -> bool:
        """True if a startup reads the file and it is not a weight file."""
        return self.path in SETTINGS or bool(TEMPLATE.fullmatch(self.path))


class Snapshot:
    """A repository at one commit, on the hub and in the local cache.

    Attributes:
      folder: Folder of the commit in the cache, possibly incomplete.
    """

    def __init__(self, hub: Hub, repository: Repository) -> None:
        """Lists the files of the repository.

        Raises:
          HubError: The hub cannot be reached, or has no such model for this user.
        """
        self._hub, self._repository = hub, repository
        self._client, self._stopped = HubClient(hub, repository), threading.Event()
        listed = map(HubFile.of_sibling, self._client.list_files())
        self._files = {file.path: file for file in listed}
        self._storage = repository.folder(hub.cache)
        self.folder = repository.snapshot(hub.cache, self._client.commit)

    def __str__(self) -> str:
        return str(self._repository)

    @property
    def source(self) -> str:
        """The repository, its commit and its hub, for a log line."""
        return f"{self} (commit {self._client.commit[:8]}) from {self._hub.endpoint}"

    @property
    def weights(self) -> list[HubFile]:
        """Weight files; requires that the index of shards has been downloaded.

        Raises:
          HubError: There are no supported weights, or a file of the index is missing.
        """
        if SINGLE_FILE in self._files:
            return [self._files[SINGLE_FILE]]
        if INDEX_FILE not in self._files:
            raise self._fault(f"neither {SINGLE_FILE} nor {INDEX_FILE}")
        try:
            index = json.loads((self.folder / INDEX_FILE).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise HubError(f"{INDEX_FILE} of {self} is not a valid index of shards") from error
        for name in names:
            if name not in self._files or not WEIGHTS.fullmatch(name):
                raise HubError(f"the shard {name} is missing from {self}; use another revision")
        return [self._files[name] for name in names]

    @property
    def missing_bytes(self) -> int:
        """Bytes of the weights that are not in the cache yet."""
        return sum(self._missing(file) for file in self.weights)

    def download_settings(self) -> None:
        """Downloads the small files that a startup reads besides the weights.

        Raises:
          HubError: A file cannot be read, or the repository is not a supported model.
        """
        if CONFIG_FILE not in self._files:
            raise self._fault(f"no {CONFIG_FILE}")
        self._download_all([file for file in self._files.values() if file.is_setting], _unseen)
        with self._client.as_hub_errors():
            if TOKENIZER_FILE not in self._files:
                _write(self._repository.absence(self._hub.cache, self.folder.name), "")
            if self._repository.revision != self.folder.name:
                _write(self._storage / "refs" / self._repository.revision, self.folder.name)

    def download_weights(self, progress: Callable[[int], None]) -> None:
        """Downloads the weights that are not in the cache.

        Args:
          progress: Called with the number of received bytes, from several threads.

        Raises:
          HubError: A file cannot be read or written.
        """
        self._download_all(self.weights, progress)

    def write_headers(self, folder: Path) -> None:
        """Writes a folder with the settings, and with weight files that contain only their headers.

        Opening and checking such a folder finds all faults that headers show. The files are sparse:
        they have their full length, take no space, and read as zeros.

        Raises:
          HubError: A header cannot be read.
        """
        for path in self.folder.rglob("*"):
            if path.is_file() and path.suffix != ".safetensors":
                link = folder / path.relative_to(self.folder)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
        self._each(self.weights, lambda file: self._write_header(file, folder))

    def _fault(self, lacking: str) -> HubError:
        named = fault_of_names(sorted(self._files)) or "it is not a supported model"
        return HubError(f"{self} on {self._hub.endpoint} has {lacking}: {named}")

    def _missing(self, file: HubFile) -> int:
        if (self.folder / file.path).exists() or file.size is None or file.blob is None:
            return 0
        blob = self._storage / "blobs" / file.blob
        partial = _partial(blob)
        done = file.size if blob.exists() else partial.stat().st_size if partial.exists() else 0
        return max(0, file.size - done)

    def _each(self, files: Iterable[HubFile], call: Callable[[HubFile], None]) -> None:
        """Calls a function for several files in parallel; the first error stops all."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            begun = [pool.submit(call, file) for file in files]
            try:
                for each in begun:
                    each.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _download_all(self, files: Iterable[HubFile], progress: Callable[[int], None]) -> None:
        self._each(files, lambda file: self._download(file, progress))

    def _download(self, file: HubFile, progress: Callable[[int], None]) -> None:
        pointer = self.folder / file.path
        if pointer.exists():
            return
        with self._client.as_hub_errors(file.path):
            if file.size is None or file.blob is None:
                file = self._with_metadata(file)
            blob = self._storage / "blobs" / str(file.blob)
            blob.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(blob):
                if not blob.exists():
                    self._receive(file, blob, progress)
            pointer.parent.mkdir(parents=True, exist_ok=True)
            _link(pointer, blob)

    def _with_metadata(self, file: HubFile) -> HubFile:
        """Returns the file with size and ETag of a HEAD request, for a hub whose list lacks
        them.
        """
        size, etag = self._client.metadata(file.path)
        if size is None or not BLOB.fullmatch(etag or ""):
            raise HubError(
                f"{self._hub.endpoint} reports no size or ETag of {file.path}; check HF_ENDPOINT"
            )
        return HubFile(file.path, size, etag)

    @contextmanager
    def _locked(self, blob: Path) -> Iterator[None]:
        """Locks a blob against other processes, with the same lock file as the library."""
        folder = self._hub.cache / ".locks" / self._storage.name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{blob.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _receive(self, file: HubFile, blob: Path, progress: Callable[[int], None]) -> None:
        """Downloads a file, resuming earlier attempts and retrying after failures."""
        partial, failures = _partial(blob), 0
        partial.touch()
        while (begin := partial.stat().st_size) != file.size:
            if file.size is not None and begin > file.size:
                os.truncate(partial, begin := 0)
            fault: Exception = HubError(f"{self._hub.endpoint} sends no bytes of {file.path}")
            try:
                self._receive_from(file, partial, begin, progress)
            except Exception as error:
                if not self._client.is_passing(error):
                    raise
                fault = error
            failures = 0 if partial.stat().st_size > begin else failures + 1
            if failures == RETRIES:
                raise fault
            time.sleep(pause_s(failures))
        if SHA256.fullmatch(blob.name) and _sha256(partial) != blob.name:
            partial.unlink()
            raise HubError(
                f"{file.path} of {self} has the wrong SHA-256 after download; start again"
            )
        partial.rename(blob)

    def _receive_from(
        self, file: HubFile, partial: Path, begin: int, progress: Callable[[int], None]
    ) -> None:
        with self._client.stream(file.path, begin, None) as response, partial.open("r+b") as out:
            if response.status_code != 206:  # the hub sends the whole file
                progress(-begin)
                begin = 0
            out.seek(begin)
            out.truncate()
            for chunk in response.iter_bytes():
                out.write(chunk)
                progress(len(chunk))
                if self._stopped.is_set():
                    raise HubError(f"the download of {self} was stopped")
            if file.size is not None and out.tell() > file.size:
                out.truncate(0)
                raise HubError(f"{file.path} of {self} is longer than the hub lists; start again")

    def _write_header(self, file: HubFile, folder: Path) -> None:
        with self._client.as_hub_errors(file.path):
            header = self._client.read(file.path, 0, HEADER_BYTES)
            length = 8 + int.from_bytes(header[:8], "little")
            if len(header) < length <= MOST_HEADER_BYTES:
                header += self._client.read(file.path, len(header), length)
            self._write_sparse(file, folder / file.path, header[:length])

    def _write_sparse(self, file: HubFile, path: Path, header: bytes) -> None:
        try:
            tensors = json.loads(header[8:])
            tensors.pop("__metadata__", None)
            ends = {name: map(int, x["data_offsets"]) for name, x in tensors.items()}
            ends = {name: (begin, end) for name, (begin, end) in ends.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise HubError(
                f"{file.path} of {self} is not a valid safetensors file; use another revision"
            ) from error
        size = len(header) + max((end for _, end in ends.values()), default=0)
        if file.size not in (None, size):
            raise HubError(f"{file.path} of {self} is truncated; use another revision")
        with path.open("wb") as out:
            out.write(header)
            for name, (begin, end) in ends.items():
                if name.rpartition(".")[2] in MAPS:
                    out.seek(len(header) + begin)
                    out.write(self._client.read(file.path, out.tell(), len(header) + end))
            out.truncate(size)


def check_space(hub: Hub, num_bytes: int) -> None:
    """Checks that the cache's disk has room for a download.

    Raises:
      HubError: Less space is free.
    """
    folder = next(path for path in (hub.cache, *hub.cache.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise HubError(
            f"the weights need {num_bytes / 1e9:.1f} GB more, but the disk of {hub.cache} has "
            f"{free / 1e9:.1f} GB free; free some space, or give another folder as --download-dir"
        )


def _partial(blob: Path) -> Path:
    """Returns the file of an incomplete blob."""
    return blob.with_name(f"{blob.name}.incomplete")


def _link(pointer: Path, blob: Path) -> None:
    """Links a blob into a snapshot; on a file system without links, moves the blob there."""
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:
        return  # another process was faster
    except OSError:
        blob.rename(pointer)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _unseen(num_bytes: int) -> None:
    """Ignores the number of received bytes."""
