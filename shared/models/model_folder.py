"""Model folder: its settings files, each parsed when it is first needed, and once."""

from functools import cached_property
from pathlib import Path

from shared.models.config_fields import Json, read_json
from shared.models.file_kind import CONFIG_FILE, GENERATION_FILE, folder_fault


class ModelFolder:
    """Folder of a model or of a draft model.

    Attributes:
      path: Its path.
    """

    def __init__(self, path: str | Path, description: str = "the model folder") -> None:
        """Opens no file.

        Args:
          path: Path of the folder.
          description: Noun phrase for the folder in messages.
        """
        self.path = Path(path)
        self._description = description
        self._files: dict[str, Json] = {}

    @cached_property
    def config(self) -> Json:
        """Contents of config.json.

        Raises:
          ValueError: The folder or the file is missing or invalid.
        """
        if fault := folder_fault(self.path, self._description):
            raise ValueError(fault)
        return read_json(self.path / CONFIG_FILE)

    @property
    def generation_config(self) -> Json:
        """Contents of generation_config.json; see `optional`."""
        return self.optional(GENERATION_FILE)

    def optional(self, name: str) -> Json:
        """Returns the contents of a JSON file by its name; empty if the folder does not have it.

        Raises:
          ValueError: The file is invalid.
        """
        if name not in self._files:
            path = self.path / name
            self._files[name] = read_json(path) if path.is_file() else {}
        return self._files[name]
