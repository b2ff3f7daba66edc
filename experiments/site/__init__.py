"""The documentation as a site: docs/ and the files that it links to, and pages generated from the code.

:mod:`~experiments.site.tree` collects the pages and completes the navigation, :mod:`~experiments.site.reference` writes
the pages about choices of the configuration. Zensical renders the result, checks links and anchors, and fills the pages
of docs/api from docstrings by mkdocstrings.
"""
