"""``setting=...`` on the main command line: one setting, or with ``--multirun`` a list of settings to sweep over.

A setting is expanded to ``method=``, ``quantizer=`` and ``method.KEY=`` before it is passed to Hydra. A list is one
axis of the sweep; each job expands its own setting.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.cli.overrides import bracketed
from kvbench.config.setting import Setting, parse_list
from kvbench.errors import ConfigError

KEY = "setting"
#: groups that a setting replaces
COVERED = ("method", "quantizer")


def chosen_settings(texts: Sequence[str], multirun: bool) -> list[Setting]:
    """Return the settings listed after ``setting=`` among overrides as typed; an empty list if there is none.

    Raises:
        ConfigError: a setting cannot be parsed, is combined with ``method=`` or ``quantizer=``, or several are given
            without ``--multirun``.
    """
    values = [text.partition("=")[2] for text in texts if _is_setting(text)]
    if not values:
        return []
    if len(values) > 1:
        raise ConfigError(KEY, values[1], "is given twice", hint=f"--multirun {KEY}={','.join(values)}")
    value = values[0]
    if value[:1] in ("'", '"') and value[-1:] == value[:1] and len(value) > 1:
        value = value[1:-1]
    settings = parse_list(value)
    for text in texts:
        key = text.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] in COVERED:
            option = text.partition(".")[2]
            better = f"{value}:{text if key.startswith('quantizer.') else option}" if option else f"{KEY}=..."
            raise ConfigError(
                KEY,
                value,
                f"already sets the method, the quantizer and their options, so {key} cannot be set as well",
                hint=better,
            )
    if len(settings) > 1 and not multirun:
        raise ConfigError(KEY, value, "is a list of settings, which only a sweep accepts", hint="add --multirun")
    return settings


def variants(texts: Sequence[str], multirun: bool) -> list[list[str]]:
    """Return the overrides of each setting (:func:`chosen_settings`), in place of ``setting=``.

    Without ``setting=``, the list contains only `texts`. Without a sweep, brackets are added to the value of
    ``method.layers`` (:func:`kvbench.cli.overrides.bracketed`).
    """
    texts = texts if multirun else [bracketed(text) for text in texts]
    settings = chosen_settings(texts, multirun)
    if not settings:
        return [list(texts)]
    return [
        [word for text in texts for word in (setting.overrides() if _is_setting(text) else [text])]
        for setting in settings
    ]


def _is_setting(text: str) -> bool:
    return text.startswith(f"{KEY}=")
