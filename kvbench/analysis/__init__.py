"""Attention analysis: how methods change a model's attention, measured without reference answers.

:mod:`~kvbench.analysis.exact` and :mod:`~kvbench.analysis.compare` define the figures. While the model decodes,
:mod:`~kvbench.analysis.observe` computes them. :func:`kvbench.analysis.analyse.analyse` analyses a list of prompts.
"""
