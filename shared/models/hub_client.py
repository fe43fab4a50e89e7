"""Requests to the hub for one repository, through `huggingface_hub`, with readable errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from shared.models.hub import COMMIT, Hub, HubError, Repository, offline_fault

TIMEOUT_S = 10.0
"""Seconds to wait for the hub, unless HF_HUB_DOWNLOAD_TIMEOUT has another number."""

RETRIES = 5
"""Consecutive attempts without any received byte before a download fails."""

CLIENT = "tandem"
"""Name in the user agent of requests."""


class HubClient:
    """Requests for the files of a repository at one commit.

    Attributes:
      commit: The commit of the revision, once `list_files` has found it.
    """

    def __init__(self, hub: Hub, repository: Repository) -> None:
        self._hub, self._repository = hub, repository
        self._library = import_module("huggingface_hub")
        self.commit = ""

    def list_files(self) -> list[Any]:
        """Lists the repository's files, each as `huggingface_hub.hf_api.RepoSibling` describes it.

        Raises:
          HubError: The hub cannot be reached, or has no such model for this user.
        """
        hub, repository = self._hub, self._repository
        with self.as_hub_errors():
            found = self._library.HfApi(endpoint=hub.endpoint, library_name=CLIENT).model_info(
                repository.repo_id,
                revision=repository.revision,
                files_metadata=True,
                timeout=_timeout_s(),
            )
        if not COMMIT.fullmatch(found.sha or ""):
            raise HubError(f"{hub.endpoint} reports no commit of {repository}; check HF_ENDPOINT")
        self.commit = found.sha
        return found.siblings or []

    def metadata(self, path: str) -> tuple[int | None, str | None]:
        """Returns the size and the ETag of a file, from a HEAD request."""
        found = self._library.get_hf_file_metadata(self._url(path), timeout=_timeout_s())
        return found.size, found.etag

    @contextmanager
    def stream(self, path: str, begin: int, end: int | None) -> Iterator[Any]:
        """Opens a response with a range of bytes of a file.

        Args:
          path: Path of the file in the repository.
          begin: First byte.
          end: Byte after the last; None for the end of the file.

        Yields:
          A response of the library's HTTP client. Its status is 200 instead of 206 if the hub
          ignores ranges and sends the whole file.
        """
        utils = self._library.utils
        headers = {
            **utils.build_hf_headers(library_name=CLIENT),
            "Accept-Encoding": "identity",  # sizes and ranges refer to the file itself
        }
        if begin or end is not None:
            headers["Range"] = f"bytes={begin}-{'' if end is None else end - 1}"
        how = {"headers": headers, "timeout": _timeout_s(), "follow_redirects": True}
        with utils.get_session().stream("GET", self._url(path), **how) as response:
            if response.is_error:
                response.read()
            utils.hf_raise_for_status(response)
            yield response

    def read(self, path: str, begin: int, end: int) -> bytes:
        """Reads a range of bytes of a file, or up to its end; retries several times."""
        for attempt in range(1, RETRIES):
            try:
                return self._read(path, begin, end)
            except Exception as error:
                if not self.is_passing(error):
                    raise
                time.sleep(pause_s(attempt))
        return self._read(path, begin, end)

    def _read(self, path: str, begin: int, end: int) -> bytes:
        found = bytearray()
        with self.stream(path, begin, end) as response:
            skipped = 0 if response.status_code == 206 else begin
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) >= skipped + end - begin:
                    break
        return bytes(found[skipped : skipped + end - begin])

    @staticmethod
    def is_passing(error: Exception) -> bool:
        """Returns True if another attempt may succeed: the connection broke, or the hub is busy."""
        status = _status(error)
        if status is not None:
            return status in (408, 429) or status >= 500
        of_client = type(error).__module__.startswith("httpx")
        return of_client or isinstance(error, ConnectionError)

    @contextmanager
    def as_hub_errors(self, path: str = "") -> Iterator[None]:
        """Converts every error of the network and of the disk into a `HubError`.

        Args:
          path: The file that is read.
        """
        try:
            yield
        except HubError:
            raise
        except Exception as error:  # from the library, its HTTP client, or the disk
            raise HubError(self._sentence(error, path)) from error

    def _url(self, path: str) -> str:
        where = {"revision": self.commit, "endpoint": self._hub.endpoint}
        return self._library.hf_hub_url(self._repository.repo_id, path, **where)

    def _sentence(self, error: Exception, path: str) -> str:
        hub, model, status = self._hub, self._repository, _status(error)
        if isinstance(error, self._library.errors.OfflineModeIsEnabled):
            return offline_fault(hub, model)
        if named := self._sentence_of_library(error, path):
            return named
        if status in (401, 403):
            return (
                f"{hub.endpoint} denied access to {model} ({status}); check HF_TOKEN, or run "
                "`hf auth login`"
            )
        if status is not None:
            return f"{hub.endpoint} returned status {status} for {model}; try again later"
        if isinstance(error, OSError) and error.filename is not None:
            return (
                f"the cache {hub.cache} cannot be written: {error.strerror}; give another folder "
                "as --download-dir"
            )
        reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        return (
            f"{hub.endpoint} cannot be reached for {model} ({reason:.200}), and neither a folder "
            f"of that name nor the cache {hub.cache} has a complete copy; check the network, "
            "HTTPS_PROXY and HF_ENDPOINT, and start again: an interrupted download is resumed"
        )

    def _sentence_of_library(self, error: Exception, path: str) -> str | None:
        errors, endpoint, model = self._library.errors, self._hub.endpoint, self._repository
        sentences = {
            errors.GatedRepoError: f"{model.repo_id} is gated; accept its conditions at {endpoint}/"
            f"{model.repo_id} and set HF_TOKEN to a token of that account",
            errors.RevisionNotFoundError: f"{model.repo_id} on {endpoint} has no revision "
            f"{model.revision}; give a branch, a tag or a commit that it has",
            errors.RepositoryNotFoundError: f"there is no folder {model.repo_id} here, and "
            f"{endpoint} has no model of this id that is public; check the spelling, or set "
            "HF_TOKEN to a token that may read it",
            errors.EntryNotFoundError: f"{path} is missing from {model} on {endpoint}; use another "
            "revision",
        }
        return next((text for kind, text in sentences.items() if isinstance(error, kind)), None)


def pause_s(failures: int) -> float:
    """Returns the seconds to wait after consecutive failures."""
    return 0.5 * 2**failures if failures else 0.0


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _timeout_s() -> float:
    return float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or TIMEOUT_S)
