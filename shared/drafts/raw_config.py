"""Fields of a draft head's config.json, normalised to one spelling."""

from dataclasses import dataclass

from shared.models import config_fields
from shared.models.config_fields import Json

PLACE = "the draft model's config.json"
"""Name of the file in messages."""


@dataclass(frozen=True)
class RawDraftConfig:
    """Normalised config.json of a draft head.

    Attributes:
      kind: Name of a kind of `shared.drafts.kinds.HEADS`, or "NEXTN" for an MTP layer.
      settings: Its fields, with those of nested objects merged in.
      is_speculators: True for the speculators format.
      nested: Names of the fields from the nested object of the kind, such as `dflash_config`.
    """

    kind: str
    settings: Json
    is_speculators: bool
    nested: frozenset[str]

    def flag(self, field: str, default: bool = False) -> bool:
        """Returns a boolean field; the default if it is absent or null."""
        return config_fields.flag(self.settings, field, default, PLACE)
