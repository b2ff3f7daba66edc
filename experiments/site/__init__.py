"""The documentation as a site: docs/ and the files that it links to, pages generated from the code, and the API.

:mod:`~experiments.site.tree` collects the pages, :mod:`~experiments.site.links` resolves links,
:mod:`~experiments.site.reference` writes the pages about choices of the configuration, :mod:`~experiments.site.api`
those about modules, and :mod:`~experiments.site.navigation` completes mkdocs.yml. Zensical renders the result.
"""
