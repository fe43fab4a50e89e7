"""Imports of modules by name, from any room (folder) of a package."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def module_in(package: str, name: str) -> ModuleType:
    """Imports the module of this name from a room of a package.

    Args:
      package: Full name of the package, such as `kernels.triton_gpu`.
      name: Name of the module, unique among the rooms of the package.

    Raises:
      ImportError: No room, or more than one, has such a module.
    """
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    rooms = [path.parent.name for x in folders or () for path in Path(x).glob(f"*/{name}.py")]
    if len(rooms) != 1:
        raise ImportError(f"{package} has {len(rooms)} modules called {name}")
    return import_module(f"{package}.{rooms[0]}.{name}")
