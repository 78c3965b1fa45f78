"""Where the value of a setting came from: a kind, which code branches on, and a detail, which people read."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OriginKind(enum.Enum):
    """Each member's value is how its origins begin in config.yaml. Specific kinds come before general ones."""

    DEFAULT = "default"
    COMMAND_LINE = "command line"
    PYTHON = "python"
    RECIPE = "recipe "
    INHERITED = "inherited from "
    SAVED = "saved configuration "
    OPEN = "left open by "
    DEPTH_DIAL = "chosen: the depth dial"
    BASE_RUN = "chosen: the run of recipe:"  # `init` or a teacher: the run of a recipe that was trained first
    UNTRAINED = "chosen: not trained for a plan"
    DERIVED = "chosen: "
    OTHER = ""


_DERIVED = (OriginKind.DEPTH_DIAL, OriginKind.BASE_RUN, OriginKind.UNTRAINED, OriginKind.DERIVED)
_OPEN_ENDED = (" ", ":")  # kinds that end so take a detail


@dataclass(frozen=True)
class Origin:
    """`str(origin)` is the text that config.yaml and `bessemer config` show."""

    kind: OriginKind
    detail: str = ""

    def __str__(self) -> str:
        return self.kind.value + self.detail

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Return the origin that config.yaml holds as `text`."""
        for kind in OriginKind:
            if text == kind.value or (kind.value.endswith(_OPEN_ENDED) and text.startswith(kind.value)):
                return cls(kind, text[len(kind.value) :])
        return cls(OriginKind.OTHER, text)

    @property
    def is_default(self) -> bool:
        return self.kind is OriginKind.DEFAULT

    @property
    def is_recipe(self) -> bool:
        return self.kind is OriginKind.RECIPE

    @property
    def is_caller(self) -> bool:
        """True for a value from the command line or from Python."""
        return self.kind in (OriginKind.COMMAND_LINE, OriginKind.PYTHON)

    @property
    def is_derived(self) -> bool:
        """True for a value that the program chose."""
        return self.kind in _DERIVED

    @property
    def reason(self) -> str:
        """The text without the word for a derived value."""
        return str(self).removeprefix(OriginKind.DERIVED.value)


DEFAULT = Origin(OriginKind.DEFAULT)
COMMAND_LINE = Origin(OriginKind.COMMAND_LINE)
PYTHON = Origin(OriginKind.PYTHON)
