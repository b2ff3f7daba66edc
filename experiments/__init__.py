"""Every table and figure of the three papers by one command: ``python -m experiments``.

**Adding an item.** Write ``experiments/PAPER/tableN.py`` or ``figureN.py`` with one constant ``ITEM``; there is no
other list. Item files declare, and hold no machinery and no published number. Read :mod:`experiments.item` for the
fields, and ``experiments/cocktail/table2.py`` for an example.

1. *A table of runs* is a :class:`~experiments.item.Grid`: rows are settings in the grammar ``kivi:int4:residual=64``,
   columns are data sets (``data`` is a choice of ``conf/dataset``, ``task`` one of its tasks, ``options`` further
   overrides). Each (model, setting, data set, task) is one run of kvbench with the id that the typed command has, so
   that items share runs. ``figure`` names a fold in :mod:`experiments.fold.figures` (``score``, ``perplexity``,
   ``acceptance``, ``kv_mib``, ``tpot_s``, ``peak_decode``, ...): a new figure is one entry there.
2. *The paper's numbers* come from ``results/published/<published>.csv``: the ``published`` mappings of model (its
   name, if the CSV has a column ``model``), row and column together select one line, and ``value`` names its number
   column.
3. ``groups`` are means over columns (averages, groups of tasks); ``base`` is the row that paired differences are
   taken to.
4. ``claims`` are bounds on the paired difference of two rows, which its 95 % interval holds against them
   (:data:`experiments.fold.claims.RULE`). ``words`` are claims that no two cells can decide.
5. ``--data mini`` replaces the columns by ``mini`` (default: the five tasks of ``dataset=mini``); a group names its
   ``mini`` columns. A row's ``small`` is its setting with mini and standin, where weights of an encoder are missing.
   Keep the tasks, and all lengths, as they are in ``dataset=mini`` where possible: then items share the runs.
   ``--data real`` is the paper's data for another trained model: columns of time are left out, ``real`` replaces the
   others where the data at hand or the model cannot serve them, and a row's ``real`` is its setting there. A column of
   ``data="fidelity/answers"`` and ``over`` has KL divergence and flips over fp16's own answers.
6. ``--data standin`` reads generated records: a data set's layout is an entry of :data:`experiments.standin.LAYOUTS`.
7. *Points of time and memory* are columns with ``data="efficiency"``, ``prompt``, ``batch``, ``new_tokens`` and
   figures such as ``peak_decode`` (``scale=2**-30``, ``unit="GiB"``). With the paper's models they are first looked
   for in ``results/h200/papers/*.json``, the files of ``python -m kvbench.bench memory|tpot --out
   results/h200/papers``, by model, setting (however it is written), prompt and batch. A row's ``timed`` is its
   setting there.
8. *Anything else* is a :class:`~experiments.item.Computed`: ``compute="module:function"`` below ``experiments.fold``
   is called with the item and the plan, and returns :class:`~experiments.fold.cells.Folded` (cells, headings, and
   arrays for pictures).
9. ``draw`` is ``table``, ``bars`` (a bar per row; per model, or per column), ``lines`` (a line per row over the
   columns' ``x``), ``heat`` (``arrays["heat"]``) or ``boxes`` (``arrays["boxes"]``).

Try it: ``python -m experiments PAPER/tableN --models tiny --data mini --limit 2``, and ``--dry-run`` for the
commands.
"""

import sys

if sys.argv[:1] == ["-m"]:  # so it is while `python -m experiments...` imports this package
    from kvbench.util.door import guard

    guard()
