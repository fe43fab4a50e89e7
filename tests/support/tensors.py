"""Memory of records of torch tensors."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensor_bytes(record: Any) -> int:
    """Returns the bytes of all tensors in a record; shared memory counts once."""
    storages = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif is_dataclass(value):
            for item in fields(value):
                visit(getattr(value, item.name))
        elif isinstance(value, tuple | list | dict):
            for each in value.values() if isinstance(value, dict) else value:
                visit(each)

    visit(record)
    return sum(storages.values())
