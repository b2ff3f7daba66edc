"""Pages about the choices of the configuration, made from conf/, the dataclasses and their docstrings."""

from __future__ import annotations

from experiments.site import method_page, model_page
from experiments.site.text import class_markdown, escaped_cell, option_table, sentence
from kvbench.cli.choice import Choice, choice, decoding
from kvbench.util.confdir import group_options

#: titles and first sentences of the pages that show all choices of a group
GROUPS = {
    "quantizer": (
        "Quantizers",
        "A quantizer is the packed format of keys and values. Each method has a default, and lists those it accepts.",
    ),
    "dataset": (
        "Data sets",
        "Data sets of one class have the same options; the table shows the defaults of the first of them. "
        "`python -m kvbench --help dataset=NAME` shows those of each.",
    ),
    "runtime": (
        "Runtime",
        "These options say how a run is executed. Only `runtime.seed` is part of the run's id.",
    ),
    "logger": ("Loggers", "A logger receives a row for each finished run; `results/runs` has everything all the same."),
    "launcher": ("Launchers", "A launcher runs the jobs of a sweep."),
    "experiment": ("Presets of runs", "A preset sets several groups at once: `python -m kvbench experiment=NAME`."),
}


def generated_pages() -> dict[str, str]:
    """Return the generated pages by path on the site."""
    texts = {
        f"reference/method/{name}.md": method_page.write_method_page(choice("method", name))
        for name in group_options("method")
    }
    texts["reference/models.md"] = model_page.write_model_page()
    for group, (title, intro) in GROUPS.items():
        texts[f"reference/{group}.md"] = _group(group, title, intro)
    texts["reference/decoding.md"] = (
        "# Decoding\n\nThese options say how answers are generated. All of them are part of the run's id.\n\n"
        + option_table(decoding().options)
    )
    return texts


def _group(group: str, title: str, intro: str) -> str:
    """Return the page of a group: a section for each class of choices with the same options."""
    families: dict[tuple[object, ...], list[Choice]] = {}
    earlier: Choice | None = None
    for name in sorted(group_options(group), key=lambda name: name != "default"):
        chosen = choice(group, name)
        key = (chosen.target,) if group == "dataset" else (name,)
        families.setdefault(key, []).append(chosen)
    parts = [f"# {title}", intro]
    for family in families.values():
        first = family[0]
        if len(family) > 1 and first.target is not None:
            parts.append(f"## `{first.target.__name__}`")
            about = "\n".join(f"- `{group}={one.name}`: {escaped_cell(one.summary)}" for one in family)
        else:
            parts.append(f"## `{group}={first.name}`")
            about = sentence(escaped_cell(first.summary))
        parts += [class_markdown(first.target), about] if first.target is not None else [about]
        if first.sets:
            parts.append("It sets " + ", ".join(f"`{item}`" for item in first.sets) + ".")
        rows = first.options
        if earlier is not None and group in ("quantizer", "runtime"):
            known = {option.key: option.default for option in earlier.options}
            rows = tuple(option for option in rows if known.get(option.key) != option.default)
        if earlier is not None and len(rows) < len(first.options):
            parts.append(f"Other options have the defaults of `{group}={earlier.name}`.")
        if rows:
            parts.append(option_table(rows))
            earlier = earlier or first
    return "\n\n".join(parts) + "\n"
