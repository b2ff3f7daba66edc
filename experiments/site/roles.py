"""Extension of Griffe, which reads docstrings for mkdocstrings: references such as :class:`Task` become code.

The project's docstrings use Sphinx's roles, and two colons before an indented block, which Markdown does not know.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


class Roles(griffe.Extension):
    """Rewrite of every docstring when it has been read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the roles in the docstring of `obj`, if it has one."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::(?=\n\n)", ":", text)
