"""What records of torch's tensors take of memory."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensor_bytes(record: Any) -> int:
    """Of the memory of all tensors in a record, each part once."""
    storages = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif is_dataclass(value):
            for item in fields(value):
                visit(getattr(value, item.name))
        elif isinstance(value, tuple | list):
            for each in value:
                visit(each)

    visit(record)
    return sum(storages.values())
