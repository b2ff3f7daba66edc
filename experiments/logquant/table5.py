"""LogQuant, Table 5: the data sets."""

from dataclasses import replace

from experiments.item import Computed, Described
from experiments.logquant.common import DATASETS, GSM8K, TASKS

_GROUPS = {task: name for name, tasks in TASKS.items() for task in tasks}

ITEM = Computed(
    id="logquant/table5",
    number="Table 5",
    title="Statistics of the data sets",
    compute="statistics:of_datasets",
    options={
        "rows": (
            Described("gsm8k: Math", replace(GSM8K, options=(), published={"dataset": "gsm8k"})),
            *(Described(f"{column.name}: {_GROUPS[column.name]}", column) for column in DATASETS),
        )
    },
    needs="gsm8k, longbench",
    published="logquant_table5",
    caption="""The paper: numbers of records, and mean lengths in words (English, code) or characters (Chinese), as
    LongBench's own table has them. Here: the records that kvbench asks, with LongBench's field `length`; GSM8K's
    length is that of the prompt with its five examples, which the paper's 240 is not.""",
)
