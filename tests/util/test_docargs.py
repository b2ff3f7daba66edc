"""Descriptions of fields from docstrings: several lines, several names, base classes, and sections that follow."""

from kvbench.util.confdir import field_descriptions


class Base:
    """A base.

    Args:
        size: of the base.
        kept: from the base.
    """


class Derived(Base):
    """A class.

    Args:
        size: number of tokens,
            or ``None``.
        first, second: two of them.

    Raises:
        ValueError: never.
    """


class Bare(Derived):
    pass


def test_descriptions_of_a_class_and_its_bases() -> None:
    expected = {"size": "number of tokens, or ``None``.", "kept": "from the base."}
    expected |= dict.fromkeys(("first", "second"), "two of them.")
    assert field_descriptions(Derived) == expected == field_descriptions(Bare)
    assert field_descriptions(int).get("ValueError") is None
