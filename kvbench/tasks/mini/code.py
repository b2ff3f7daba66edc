"""Generated Python-like code: functions that look meaningful but are not."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.rng import Rng

_VERBS = (
    "build",
    "check",
    "clean",
    "close",
    "collect",
    "convert",
    "copy",
    "count",
    "create",
    "delete",
    "encode",
    "fetch",
    "filter",
    "find",
    "format",
    "group",
    "handle",
    "index",
    "join",
    "load",
    "merge",
    "move",
    "open",
    "parse",
    "pick",
    "print",
    "read",
    "remove",
    "render",
    "replace",
    "reset",
    "resolve",
    "save",
    "scan",
    "select",
    "send",
    "sort",
    "split",
    "store",
    "update",
    "validate",
    "visit",
    "wrap",
    "write",
)
_NOUNS = tuple(word for word in words.TOOLS + words.ANIMALS + words.FOODS + words.PLACES if len(word) < 9)
_SUFFIXES = ("count", "name", "list", "map", "size", "index", "limit", "path", "total", "value", "items", "key")
_METHODS = ("append", "extend", "update", "get", "pop", "remove", "insert", "index", "strip", "split", "join")
_OPERATORS = ("+", "-", "*", "//", "%")
_COMPARISONS = ("<", ">", "==", "!=", "<=", ">=")


@dataclass(frozen=True)
class Call:
    """A line of generated code that assigns a result: the part that a question quotes, and the part that it asks for.

    `prefix` is the indentation and the name of the variable; `rest` begins with the space before ``=``.
    """

    prefix: str
    rest: str


def name(rng: Rng) -> str:
    """Return a random identifier made of a noun and a suffix, for example ``lantern_count``."""
    return f"{rng.choice(_NOUNS)}_{rng.choice(_SUFFIXES)}"


def function_name(rng: Rng) -> str:
    """Return a random function name made of a verb and a noun, for example ``merge_kettle``."""
    return f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"


def _expression(rng: Rng, variables: list[str]) -> str:
    kind = rng.below(6)
    first = rng.choice(variables)
    if kind < 2:
        return f"{first} {rng.choice(_OPERATORS)} {rng.between(2, 99)}"
    if kind == 2:
        return f"{function_name(rng)}({first}, {rng.choice(variables)})"
    if kind == 3:
        return f"{first}.{rng.choice(_METHODS)}({rng.choice(variables)})"
    if kind == 4:
        return f"len({first}) {rng.choice(_OPERATORS)} {rng.between(1, 9)}"
    return f"[{function_name(rng)}(item) for item in {first}]"


def call(rng: Rng) -> Call:
    """Return a random assignment such as ``kettle_otter_size = merge_anvil(barrel_map, 17, lamp=rope)``.

    The variable's name has three parts and all other identifiers have at most two, so other generated code never
    contains it. Two calls of this function may return the same name, however.
    """
    target = f"{rng.choice(_NOUNS)}_{rng.choice(_NOUNS)}_{rng.choice(_SUFFIXES)}"
    arguments = f"{name(rng)}, {rng.between(2, 999)}, {rng.choice(_NOUNS)}={rng.choice(_NOUNS)}"
    return Call(f"    {target}", f" = {function_name(rng)}({arguments})")


def function(rng: Rng, inside: Call | None = None) -> str:
    """Return the source code of a random Python function of 4 to 14 lines.

    `inside` is an assignment to insert between two top-level statements of the function; None to insert nothing.
    """
    arguments = [name(rng) for _ in range(rng.between(1, 3))]
    variables = list(arguments)
    lines = [f"def {function_name(rng)}({', '.join(arguments)}):"]
    if rng.below(2):
        lines.append(
            f'    """{rng.choice(_VERBS).capitalize()} the {rng.choice(_NOUNS)} of the {rng.choice(_NOUNS)}."""'
        )
    count = rng.between(2, 5)
    at = rng.below(count) if inside else -1
    for i in range(count):
        if i == at and inside:
            lines.append(inside.prefix + inside.rest)
        kind = rng.below(6)
        if kind < 3:
            target = name(rng)
            lines.append(f"    {target} = {_expression(rng, variables)}")
            variables.append(target)
        elif kind == 3:
            lines.append(f"    if {rng.choice(variables)} {rng.choice(_COMPARISONS)} {rng.between(0, 99)}:")
            lines.append(f'        raise ValueError("bad {rng.choice(_NOUNS)}")')
        elif kind == 4:
            item = rng.choice(_NOUNS)
            lines.append(f"    for {item} in {rng.choice(variables)}:")
            lines.append(f"        {rng.choice(variables)}.{rng.choice(_METHODS)}({item})")
        else:
            lines.append(f"    while {rng.choice(variables)} {rng.choice(_COMPARISONS)} {rng.between(0, 99)}:")
            lines.append(f"        {rng.choice(variables)} = {_expression(rng, variables)}")
    lines.append(f"    return {_expression(rng, variables)}")
    return "\n".join(lines)
