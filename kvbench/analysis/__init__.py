"""Attention analysis: how methods change a model's attention, compared with exact keys and values, without labels.

:mod:`~kvbench.analysis.exact` and :mod:`~kvbench.analysis.compare` define the figures, :mod:`~kvbench.analysis.observe`
takes them while the model decodes, :func:`kvbench.analysis.analyse.analyse` runs samples.
"""
