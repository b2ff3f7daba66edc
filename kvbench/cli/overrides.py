"""Rules for single overrides, as Hydra parses them: what it would let pass, and its refusals in our form."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from kvbench.errors import ConfigError


def is_hydras(override: Override) -> bool:
    """Whether the override is for Hydra itself (``hydra.launcher.n_jobs=2``)."""
    return override.key_or_group.startswith(("hydra.", "hydra/"))


def value(override: Override) -> str:
    """An override's value as it was typed; a sweep's values by commas."""
    if override.is_sweep_override():
        return ",".join(str(choice) for choice in override.sweep_string_iterator())
    return "" if override.is_delete() and override.value() is None else override.get_value_element_as_str()


def check_repeats(overrides: Sequence[Override]) -> None:
    """Raise ConfigError for a key that is given twice: Hydra lets the last one win in silence."""
    seen: dict[str, Override] = {}
    for override in overrides:
        key = override.key_or_group
        if key in seen:
            both = f"{value(seen[key])} and {value(override)}"
            raise ConfigError(key, value(override), f"is given twice, as {both}", hint=f"give {key}=... once")
        seen[key] = override


def refuse_marks(text: str, override: Override) -> None:
    """Raise ConfigError for ``+``, ``~`` and ``@package``: a configuration's keys are fixed, each in its place."""
    key = override.key_or_group
    if is_hydras(override):
        return
    if override.is_delete():
        raise ConfigError(text, None, "nothing can be left out of a configuration", hint=f"choose a value: {key}=...")
    if override.is_add() or override.is_force_add():
        raise ConfigError(
            text, None, "nothing can be added to a configuration", hint=f"without the '+': {text.lstrip('+')}"
        )
    if override.package is not None:
        raise ConfigError(text, None, "a group stands in its own place", hint=f"{key}={value(override)}")


def as_sweeps(texts: Sequence[str], groups: Collection[str]) -> list[str]:
    """Overrides of a sweep over choices, each plain key as a sweep over its one value.

    Hydra composes a sweep's own configuration first, from what is not swept: with ``dataset=a,b dataset.path=X`` from
    the default data set and its `path`, which it need not have. As a sweep the key goes to the jobs alone.
    """
    parser = OverridesParser.create()
    parsed = [parser.parse_override(text) for text in texts]
    if not any(override.key_or_group in groups and override.is_sweep_override() for override in parsed):
        return list(texts)
    return [
        f"{override.key_or_group}=choice({text.split('=', 1)[1] or repr('')})"
        if not (is_hydras(override) or override.key_or_group in groups or override.is_sweep_override())
        else text
        for text, override in zip(texts, parsed, strict=True)
    ]


def explain(error: Exception, texts: Sequence[str]) -> ConfigError:
    """Hydra's own refusal in our form."""
    said = first_line(error)
    hint = "this launcher is a plugin: pip install 'kvbench[launch]'" if "hydra/launcher" in str(error) else ""
    return ConfigError(" ".join(texts) or "configuration", None, said, hint=hint)


def first_line(error: Exception) -> str:
    """The first line of an error's message, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
