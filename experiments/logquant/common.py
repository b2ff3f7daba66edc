"""The models, methods, data sets and task groups that LogQuant's items share."""

from collections.abc import Mapping
from typing import Any

from experiments.item import Claim, Column, Group, Row

#: task group -> its data sets: LogQuant, Table 5
TASKS = {
    "Single-Document QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "Multi-Document QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "Summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "Few-shot Learning": ("trec", "triviaqa", "samsum", "lsht"),
    "Synthetic Tasks": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "Code Completion": ("lcc", "repobench-p"),
}
#: data sets whose published scores do not follow from the authors' own outputs
ROUGE = ("gov_report", "qmsum", "multi_news", "vcsum", "samsum", "dureader")
ROUGE_NOTE = """The published scores of gov_report, qmsum, multi_news, vcsum, samsum and dureader, and with them the
    groups that hold them, do not follow from the authors' published answers under LongBench's scorer."""

DATASETS = tuple(
    Column(task, "longbench_logquant", task=task, published={"dataset": task})
    for tasks in TASKS.values()
    for task in tasks
)
GROUPS = tuple(Group(name, columns=tasks, published={"category": name}) for name, tasks in TASKS.items())
#: with --data mini, every group would be the same mean: one stands for all
MEAN = "Mean"

#: "the length of the input token between 600 and 1700" (sec. 4.1); its script has no such filter
GSM8K = Column("GSM8K", "gsm8k_logquant", options=("dataset.prompt_tokens=[600,1700]",))

#: beside an accuracy that a small model does not have: fp16's own answers, of so many tokens, through the cache
ANSWER = 64
_ANSWERS: dict[str, Any] = {"over": GSM8K.data, "options": (*GSM8K.options, f"dataset.max_new_tokens={ANSWER}")}
GSM8K_KL = Column("KL, GSM8K", "fidelity/answers", figure="kl", scale=1.0, unit="nats", digits=4, **_ANSWERS)
GSM8K_FLIPS = Column("flips, GSM8K", "fidelity/answers", figure="flips", **_ANSWERS)


def closer(first: str, second: str) -> Claim:
    """Return the claim that a row is closer to fp16 than another: a substitute for a claim on GSM8K's accuracy."""
    return Claim(f"substitute: {first} is closer to fp16 than {second} (KL)", second, first, GSM8K_KL.name)


#: the authors' KIVI of the tables is transformers' QuantizedCache; the KIVI of its own authors stands below it
KIVI_NOTE = """"KiVi" is transformers' quantized cache with quanto, as in the authors' script: the whole prompt is
    packed, keys in groups of one token's channels. "KIVI" is the method of its own authors, which the paper does not
    measure."""

BASELINE = Row("baseline", "fp16")


def kivi(bits: int, published: Mapping[str, str]) -> Row:
    """Return the row of the paper's KiVi."""
    setting = "hf_quantized" if bits == 2 else f"hf_quantized:bits={bits}"
    return Row(f"KiVi ({bits}-bit)", setting, published=published)


def own_kivi(bits: int) -> Row:
    """Return the row of KIVI as its own authors define it, which the paper does not have."""
    return Row(f"KIVI ({bits}-bit)", f"kivi:int{bits}")


def logquant(bits: int, published: Mapping[str, str]) -> Row:
    """Return the row of LogQuant."""
    setting = "logquant" if bits == 2 else f"logquant:int{bits}_g64"
    return Row(f"LogQuant ({bits}-bit)", setting, published=published)


#: the methods at 2 and at 4 bits, as the tables with both name them
TWO_AND_FOUR = (
    *(kivi(bits, {"method": f"KiVi ({bits}-bit)"}) for bits in (2, 4)),
    *map(own_kivi, (2, 4)),
    *(logquant(bits, {"method": f"LogQuant ({bits}-bit)"}) for bits in (2, 4)),
)


def released(bits: int) -> Row:
    """Return the row of LogQuant with keys as the released code packs them: groups of one token's channels."""
    setting = "logquant" if bits == 2 else f"logquant:int{bits}_g64"
    return Row(f"LogQuant ({bits}-bit), keys per token", f"{setting}:key_axis=token")


def partial(published: Mapping[str, str]) -> Row:
    """Return the row of PartialLogQuant."""
    return Row("PartialLogQuant (2-bit)", "partial_logquant", published=published)
