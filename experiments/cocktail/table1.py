"""Cocktail, Table I: the data sets and their metrics."""

from experiments.cocktail.common import DATASETS
from experiments.item import Computed, Described

_KINDS = {
    "qasper": "single-document QA, F1",
    "qmsum": "summarization, ROUGE",
    "multi_news": "summarization, ROUGE",
    "trec": "few-shot learning, classification",
    "triviaqa": "few-shot learning, F1",
    "samsum": "few-shot learning, ROUGE",
    "lcc": "code completion, similarity",
    "repobench-p": "code completion, similarity",
}

ITEM = Computed(
    id="cocktail/table1",
    number="Table I",
    title="Data sets and metrics",
    compute="statistics:of_datasets",
    options={"rows": tuple(Described(f"{c.name}: {_KINDS[c.task]}", c) for c in DATASETS)},
    needs="longbench_cocktail",
    caption="""The paper names data sets, tasks and metrics, and prints neither counts nor lengths. Here: the records of
    LongBench that kvbench asks. ROUGE is ROUGE-L, the similarity of code is LongBench's edit similarity.""",
)
