"""Recognises files and folders that are not a Hugging Face model folder, with advice for each."""

import json
import re
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PIPELINE_FILE, PARAMS_FILE = "model_index.json", "params.json"
"""Settings files of a model, of an adapter, of a diffusers pipeline, and of the formats of Mistral
and Meta."""

TOKENIZER_FILE, GENERATION_FILE = "tokenizer.json", "generation_config.json"
SETTINGS = (CONFIG_FILE, TOKENIZER_FILE, "tokenizer_config.json", GENERATION_FILE)
"""Settings files that may be Git LFS pointers."""

SHARD = re.compile(r"-of-\d+\.safetensors$")
ORBAX_FOLDER = "orbax"
"""Folder of weights in the format of `jax_impl.convert`."""

FOLDER_NEEDED = "give the folder of a Hugging Face checkpoint with safetensors files"
CONVERTED = (
    "give the checkpoint with safetensors files from which it was made, by its folder or hub id"
)
SAVED_AGAIN = (
    "it is never loaded because it can run code; save the model as safetensors "
    "(save_pretrained of transformers does) and give that folder"
)
WITH_BASE = (
    "give its base model, with the adapter in --lora-paths, or merge it into the weights of its "
    "base model"
)
PULLED = "run `git lfs pull` in the repository, or download the model by its hub id"


@dataclass(frozen=True)
class FileKind:
    """A kind of file that is not a model folder.

    Attributes:
      name: Noun phrase with its article.
      way_out: End of the message: the reason, if any, and what to do.
    """

    name: str
    way_out: str


GGUF = FileKind("a GGUF file", f"GGUF is not supported; {CONVERTED}")
PICKLE = FileKind("a file of pickled weights", SAVED_AGAIN)
ARCHIVE = FileKind("an archive", "unpack it and give the folder that has config.json")
SAFETENSORS = FileKind(
    "a safetensors file", "give the folder that has it beside config.json and tokenizer.json"
)
LFS_POINTER = FileKind("a Git LFS pointer instead of the file", PULLED)
WEB_PAGE = FileKind("a web page", "download the file itself; `hf download` does")
OTHER_WEIGHTS = FileKind(
    "a file of weights of another framework", f"only safetensors are read; {CONVERTED}"
)
JSON = FileKind("a JSON file", "give the folder that has it")
OTHER = FileKind("a file", FOLDER_NEEDED)
EMPTY = FileKind("an empty file", "download or save it again")

POINTER = b"version https://git-lfs"
BEGINNINGS = {
    b"GGUF": GGUF,
    **dict.fromkeys((b"lmgg", b"fmgg", b"tjgg", b"algg"), OTHER_WEIGHTS),
    POINTER: LFS_POINTER,
    b"\x80": PICKLE,
    b"\x89HDF": OTHER_WEIGHTS,
    **dict.fromkeys((b"<!DOCTYPE", b"<!doctype", b"<html", b"<?xml"), WEB_PAGE),
    **dict.fromkeys(
        (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!"), ARCHIVE
    ),
    **dict.fromkeys((b"{", b"["), JSON),
}
"""First bytes of files by kind; ZIP, tar and safetensors files need more than these."""

SUFFIXES = {
    **dict.fromkeys((".onnx", ".h5", ".msgpack", ".tflite", ".ckpt", ".mlmodel"), OTHER_WEIGHTS),
    **dict.fromkeys((".bin", ".pt", ".pth", ".pkl"), PICKLE),
    ".safetensors": SAFETENSORS,
    ".gguf": GGUF,
}
"""File suffixes by kind, for files whose first bytes are not conclusive."""


def kind_of_file(path: Path) -> FileKind:
    """Returns the kind of a file by its first bytes, else by its suffix.

    Raises:
      OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return EMPTY
    if head.startswith(b"PK\x03\x04"):
        return PICKLE if _has_pickle(path) else ARCHIVE
    if head[257:262] == b"ustar":
        return ARCHIVE
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") < path.stat().st_size:
        return SAFETENSORS
    for beginning, kind in BEGINNINGS.items():
        if head.startswith(beginning):
            return kind
    return SUFFIXES.get(path.suffix, OTHER)


def _has_pickle(path: Path) -> bool:
    """Returns True if torch.save wrote a ZIP file; a damaged file is judged by its suffix."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return SUFFIXES.get(path.suffix) is PICKLE


def is_pointer(path: Path) -> bool:
    """Returns True if a file is a Git LFS pointer."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def folder_fault(folder: Path, named: str = "the model folder") -> str | None:
    """Returns the reason why a path is not a folder with a model's settings; None if it is one.

    Args:
      folder: The path.
      named: Description of the folder in the message.
    """
    try:
        return _folder_fault(folder, named)
    except OSError as error:
        return f"{named} {folder} cannot be read: {error.strerror}"


def _folder_fault(folder: Path, named: str) -> str | None:
    if folder.is_file():
        kind = kind_of_file(folder)
        return f"{folder} is {kind.name}, but {named} is required; {kind.way_out}"
    if not folder.is_dir():
        return f"{named} {folder} does not exist"
    if not (folder / CONFIG_FILE).is_file():
        return f"{named} {folder} has no {CONFIG_FILE}: {without_config(folder)}"
    if pointer := next((name for name in SETTINGS if is_pointer(folder / name)), None):
        return f"{folder / pointer} is {LFS_POINTER.name}; {LFS_POINTER.way_out}"
    return None


def without_config(folder: Path) -> str:
    """Describes a folder without config.json and what to do."""
    names = _names(folder)
    if (folder / CONFIG_FILE).is_symlink():
        return broken_link(folder / CONFIG_FILE)
    if not names:
        return f"it is empty; {FOLDER_NEEDED}"
    if ADAPTER_FILE in names:
        return adapter(folder)
    if repositories := [name for name in names if name.startswith("models--")]:
        repo_id = repositories[0].removeprefix("models--").replace("--", "/", 1)
        return f"it is a cache of the Hugging Face hub; give the id of a model in it, as {repo_id}"
    if inner := [name for name in names if (folder / name / CONFIG_FILE).is_file()]:
        return f"its folder {inner[0]} has one; give {folder / inner[0]}"
    return fault_of_names(names) or FOLDER_NEEDED


def fault_of_names(names: Collection[str]) -> str | None:
    """Describes what is not supported in a folder or repository, by its file names; None if nothing
    is.
    """
    if ADAPTER_FILE in names:
        return f"it is an adapter ({ADAPTER_FILE}); {WITH_BASE}"
    if PIPELINE_FILE in names:
        return f"it is a diffusers pipeline ({PIPELINE_FILE}), and only text models are served"
    if PARAMS_FILE in names and CONFIG_FILE not in names:
        return (
            f"it is in the format of Mistral or Meta ({PARAMS_FILE}), which is not supported; give "
            "the same model in the format of Hugging Face, with config.json"
        )
    if any(SHARD.search(name) for name in names):
        return "it has shards without the index that lists them; download the index too"
    if others := [name for name in names if name.endswith(".safetensors")]:
        return f"it has {others[0]}, which is not the format of Hugging Face; {CONVERTED}"
    for name in names:
        kind = SUFFIXES.get(PurePosixPath(name).suffix)
        if kind in (GGUF, PICKLE, OTHER_WEIGHTS) and name not in ("training_args.bin",):
            return f"it has {name}, {kind.name}; {kind.way_out}"
    return None


def without_weights(folder: Path) -> str:
    """Describes a folder without supported weights and what to do."""
    names = _names(folder)
    for name in (SINGLE_FILE, INDEX_FILE):
        if (folder / name).is_symlink():
            return broken_link(folder / name)
    if ADAPTER_FILE in names:
        return adapter(folder)
    if (folder / ORBAX_FOLDER).is_dir():
        return "its weights are in the form of Orbax, which only the JAX backend reads"
    return fault_of_names(names) or "download its weights too, or give --load-format dummy"


def adapter(folder: Path) -> str:
    """Describes an adapter with the name of its base model."""
    try:
        settings = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
        base = settings.get("base_model_name_or_path") or "another model"
    except (OSError, ValueError, AttributeError):
        base = "another model"
    return f"it is an adapter ({ADAPTER_FILE}) of {base}; {WITH_BASE}"


def broken_link(path: Path) -> str:
    """Describes a link of a snapshot whose target is missing."""
    return (
        f"{path.name} is a link to a file that is missing, as after a download that was "
        "interrupted or a cache that was moved; download the model again"
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")
