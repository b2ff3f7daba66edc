"""Pages about public modules, which mkdocstrings fills in from their docstrings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiPage:
    """A page about some modules.

    Args:
        title: title of the page.
        intro: what it is about.
        objects: full names of modules, classes and functions.
    """

    title: str
    intro: str
    objects: tuple[str, ...]


PAGES = {
    "library": ApiPage(
        "The library",
        "Load a method, make a cache, and pass it to a model's `generate` ([the library](../python.md)).",
        (
            "kvbench.methods.load.load_method",
            "kvbench.cache.cache.KVCache",
            "kvbench.cache.prompts.Prompts",
            "kvbench.cache.bill",
            "kvbench.decoding.custom.custom_generate",
        ),
    ),
    "methods": ApiPage(
        "Base classes of methods",
        "A method derives from one of these classes ([add your own](../add-your-own.md)).",
        (
            "kvbench.methods.base.Method",
            "kvbench.methods.recency.RecencyMethod",
            "kvbench.methods.scored.ScoredMethod",
            "kvbench.cache.policy.Policy",
            "kvbench.methods.bytes.kv_bytes",
            "kvbench.methods.byte_parts",
        ),
    ),
    "tasks": ApiPage(
        "Data sets",
        "A data set derives from `Task` and yields samples.",
        ("kvbench.tasks.base", "kvbench.tasks.work", "kvbench.tasks.load.load", "kvbench.tasks.from_records.Records"),
    ),
    "quantizers": ApiPage(
        "Quantizers",
        "Quantizers turn blocks of keys or values into codes, and back.",
        ("kvbench.quantizers.spec", "kvbench.quantizers.affine", "kvbench.quantizers.hierarchical"),
    ),
    "cache": ApiPage(
        "Cache and attention",
        "What a layer holds, and the one attention function that models call.",
        (
            "kvbench.cache.layer.KVLayer",
            "kvbench.cache.store.Store",
            "kvbench.cache.segments.interface.Segment",
            "kvbench.attention.register",
            "kvbench.attention.fused",
        ),
    ),
    "decoding": ApiPage(
        "Decoding",
        "Prefill and decode loops, speculation and perplexity.",
        (
            "kvbench.decoding.autoregressive",
            "kvbench.decoding.sampling",
            "kvbench.decoding.speculative",
            "kvbench.decoding.perplexity",
        ),
    ),
    "results": ApiPage(
        "Results",
        "Files of runs: reading, comparing, tables.",
        (
            "kvbench.results.load",
            "kvbench.results.record",
            "kvbench.results.record_scores",
            "kvbench.results.record_cost",
            "kvbench.results.record_machine",
            "kvbench.results.record_errors",
            "kvbench.results.compare",
            "kvbench.results.identity",
        ),
    ),
    "metrics": ApiPage(
        "Metrics",
        "Functions from predictions and references to scores.",
        ("kvbench.metrics.longbench", "kvbench.metrics.gsm8k", "kvbench.metrics.rouge", "kvbench.metrics.ruler"),
    ),
    "profiling": ApiPage(
        "Time, memory and the roofline",
        "Clocks, peaks, and the bytes that a step must read.",
        ("kvbench.profiling.roofline", "kvbench.profiling.timing", "kvbench.profiling.memory"),
    ),
    "analysis": ApiPage(
        "Attention analysis",
        "How methods change attention ([analysis](../analysis.md)).",
        ("kvbench.analysis.analyse", "kvbench.analysis.outcome", "kvbench.analysis.exact", "kvbench.analysis.compare"),
    ),
    "errors": ApiPage("Errors", "Every error that a user can fix.", ("kvbench.errors",)),
}


def pages() -> dict[str, str]:
    """Return the pages by path on the site."""
    return {
        f"api/{name}.md": f"# {page.title}\n\n{page.intro}\n\n"
        + "\n".join(f"::: {name_of_object}\n" for name_of_object in page.objects)
        for name, page in PAGES.items()
    }
