"""The platform of a backend, imported when it is first read."""

from importlib import import_module

from shared.process.start import Platform


class LatePlatform:
    """A class attribute that is the platform of a module.

    The framework of the device takes seconds to import, and a wrong option or folder is reported
    without it.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __get__(self, instance: object, owner: type) -> Platform:
        return import_module(self._module).PLATFORM
