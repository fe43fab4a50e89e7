"""Lazily imported platform of a backend."""

from importlib import import_module

from shared.process.start import Platform


class LatePlatform:
    """Class attribute that imports a module on first access and returns its platform.

    Importing the device framework takes seconds. Invalid options and folders are reported before
    this import.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __get__(self, instance: object, owner: type) -> Platform:
        return import_module(self._module).PLATFORM
