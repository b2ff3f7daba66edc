"""Check that a method accepts the quantizer that was chosen for it."""

from __future__ import annotations

from kvbench.errors import ConfigError
from kvbench.quantizers.spec import preset


def check_taken(
    method: str, takes: tuple[str, ...], quantizer: str, needed: bool, widths: tuple[str, ...] = ()
) -> None:
    """Raise ConfigError if a method does not accept the chosen quantizer, or needs a quantizer and has none.

    Args:
        widths: the method's own keys that set its bits, for the hint.
    """
    chosen = preset(quantizer)
    if needed and set(takes) <= {"none"}:  # no choice of a quantizer helps: the YAML must name those that it takes
        wanted = "int4_token" if chosen == "none" else chosen
        hint = f"add takes: [{wanted}, ...] to the YAML of method={method.lower()}"
        if chosen == "none":
            hint += f", and choose quantizer={wanted}"
        hint += f" (from Python: load_method(..., quantizer='{wanted}', takes=['{wanted}']))"
    elif takes:
        hint = f"quantizer={next(name for name in takes if not needed or name != 'none')}"
        if widths:
            hint += f"; the bits of method={method.lower()} are set by {', '.join(f'method.{key}' for key in widths)}"
    else:
        hint = f"add takes: [{chosen}] to the YAML of method={method.lower()}"
    if needed and chosen == "none" and chosen in takes:
        raise ConfigError("quantizer", "none", f"{method} packs keys and values, so it needs a quantizer", hint=hint)
    if chosen not in takes:
        raise ConfigError(
            "quantizer",
            quantizer,
            f"method {method.lower()} does not accept this quantizer",
            allowed=takes or "no quantizer, because the list 'takes' in the method's YAML is empty",
            hint=hint,
        )
