"""Model folder of sizes with a tokenizer added, so that a server can serve it over HTTP."""

import json
import shutil
from pathlib import Path

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def worded(model: Path, source: Path, into: Path) -> Path:
    """A copy of a shape with another model's tokenizer and its chat template.

    Tokens after those of the tokenizer are made-up words, so that the output of random weights is a
    text that is as long as any other.

    Args:
      model: Folder with a config.json.
      source: Folder of a model with a tokenizer that has a BPE vocabulary.
      into: A new folder.

    Raises:
      ValueError: The shape has fewer tokens than the tokenizer.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    found = json.loads((source / TOKENIZER).read_text(encoding="utf-8"))
    vocab = found["model"]["vocab"]
    vocab |= {token["content"]: token["id"] for token in found["added_tokens"]}
    known = len(vocab)
    if known > config["vocab_size"]:
        raise ValueError(
            f"{source} has {known} tokens and {model} room for {config['vocab_size']}; take another"
        )
    vocab |= {f"Ġw{token}": token for token in range(known, config["vocab_size"])}
    into.mkdir()
    (into / TOKENIZER).write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    shutil.copy(source / SETTINGS, into)
    shutil.copy(model / "config.json", into)
    return into
