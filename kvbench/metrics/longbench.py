"""LongBench's scores, as its eval.py and metrics.py compute them (THUDM/LongBench 2e00731).

Predictions are stripped only where the official code strips them. Code similarity is fuzzywuzzy's ratio based on
difflib, which is what the official requirements install; python-Levenshtein and rapidfuzz give other values
(:data:`SIMILARITY` names the one in use and is recorded in results).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.metrics.rouge import rouge_l

#: the library that computes the similarity of code lines
SIMILARITY = "difflib"

#: the data sets of LongBench-E, whose scores are reported by bucket of length
EXTENDED = tuple(
    f"{name}_e"
    for name in (
        "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count "
        "passage_retrieval_en lcc repobench-p"
    ).split()
)

#: data sets of which only the first line of a prediction is scored
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = frozenset(string.punctuation)
_ALL_PUNCTUATION = frozenset(string.punctuation + _CHINESE_PUNCTUATION)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def score_longbench(
    dataset: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None
) -> float:
    """Score a prediction by the metric that LongBench uses for the data set.

    The result is in 0..1: the best score over the reference answers, or 0 if there are none.

    Args:
        dataset: name of a LongBench data set, for example ``qasper``, or of a LongBench-E one (:data:`EXTENDED`).
        all_classes: the classes in the record, which only ``trec`` and ``lsht`` need.

    Raises:
        KeyError: LongBench does not have this data set.
        KvbenchError: the data set is scored on Chinese words, and the package jieba is not installed.
        ValueError: a record of ``trec`` or ``lsht`` has no classes, or an answer of a passage retrieval data set does
            not name a paragraph.
    """
    metric = METRICS[base_name(dataset)]
    text = first_line(dataset, prediction)
    if problem := _unscorable(dataset, answers, all_classes):
        raise ValueError(problem)
    return max((metric(text, answer, all_classes or ()) for answer in answers), default=0.0)


def limited_rouge(dataset: str, prediction: str, answers: Sequence[str]) -> float | None:
    """Return the ROUGE score that LongBench's official code would report, which is 0 for very long sentences.

    On such sentences, its package `rouge` 1.0.1 exceeds Python's recursion limit, and the official code turns the error
    into the score 0. :func:`score_longbench` does not have this fault. The result is None if the data set is not scored
    by ROUGE.
    """
    metric = METRICS[base_name(dataset)]
    if metric not in (_rouge, _rouge_zh):
        return None
    text = first_line(dataset, prediction)
    prepare = _segmented if metric is _rouge_zh else str
    return max((rouge_l(prepare(text), prepare(answer)).limited for answer in answers), default=0.0)


def longbench_mean(scores: Sequence[float]) -> float:
    """Return the mean of scores in 0..1 as LongBench reports it: times 100, with two decimals; NaN without scores."""
    return round(100 * sum(scores) / len(scores), 2) if scores else float("nan")


def bucket(length: int) -> str:
    """Return LongBench-E's bucket of a record's ``length`` in words: ``0-4k``, ``4-8k`` or ``8k+``."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def first_line(dataset: str, prediction: str) -> str:
    """Return the part of a prediction that LongBench scores: its first line, or all of it.

    The first line counts for the data sets in :data:`FIRST_LINE`; line feeds at the beginning are skipped.
    """
    return prediction.lstrip("\n").split("\n")[0] if base_name(dataset) in FIRST_LINE else prediction


def base_name(dataset: str) -> str:
    """Return the name of a data set without LongBench-E's suffix ``_e``, if it has one."""
    return dataset.removesuffix("_e") if dataset in EXTENDED else dataset


def unanswerable(dataset: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> str | None:
    """Return why no prediction can score above 0 for a record; None if a prediction can.

    For example, the list of answers is empty, or the data set is scored by class and no answer is one of the classes.
    """
    metric = METRICS[base_name(dataset)]
    if not answers:
        return "field 'answers' is an empty list"
    if problem := _unscorable(dataset, answers, all_classes):
        return problem
    if metric is _classification and not set(answers) & set(all_classes or ()):
        return f"{dataset} is scored by class, but none of the answers {list(answers)} is in 'all_classes'"
    if metric is _count_score and not any(answer.isdigit() for answer in answers):
        return f"{dataset} is scored by number, but none of the answers {list(answers)} is a number"
    return None


def _unscorable(dataset: str, answers: Sequence[str], all_classes: Sequence[str] | None) -> str | None:
    """Return why a record cannot be scored: no classes (trec, lsht), or an answer without a paragraph; else None."""
    metric = METRICS[base_name(dataset)]
    if metric is _classification and not all_classes:
        return f"{dataset} is scored by class, but 'all_classes' is empty or missing"
    if pattern := _PARAGRAPH.get(metric):
        return next(
            (f"the answer {answer!r} does not name a paragraph" for answer in answers if not pattern(answer)), None
        )
    return None


# -- the metrics: prediction, answer, classes -> 0..1 ----------------------------------------------------------------


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 score of a prediction's words, ignoring case, punctuation and articles, as in SQuAD.

    `classes` is ignored; LongBench passes it to every metric.
    """
    return _f1(_normal(prediction).split(), _normal(answer).split())


def _qa_f1_zh(prediction: str, answer: str, classes: Sequence[str]) -> float:
    tokens, wanted = (
        [token for word in _chinese_words(text) if (token := _normal_zh(word))] for text in (prediction, answer)
    )
    return _f1(tokens, wanted)


def _rouge(prediction: str, answer: str, classes: Sequence[str]) -> float:
    return rouge_l(prediction, answer).f


def _rouge_zh(prediction: str, answer: str, classes: Sequence[str]) -> float:
    return rouge_l(_segmented(prediction), _segmented(answer)).f


def _classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    named = [name for name in classes if name in prediction]
    # the official code removes entries from the list that it iterates over, so the entry after a removed one is skipped
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])
        place += 1
    return 1.0 / len(named) if answer in named else 0.0


def _count_score(prediction: str, answer: str, classes: Sequence[str]) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(number == answer for number in numbers) / len(numbers) if numbers else 0.0


def _retrieval(prediction: str, answer: str, classes: Sequence[str]) -> float:
    return _count_score(prediction, _PARAGRAPH[_retrieval](answer)[0], classes)


def _retrieval_zh(prediction: str, answer: str, classes: Sequence[str]) -> float:
    return _count_score(prediction, _PARAGRAPH[_retrieval_zh](answer)[0], classes)


Metric = Callable[[str, str, Sequence[str]], float]

#: the numbers in a reference such as ``Paragraph 7``
_PARAGRAPH: dict[Metric, Callable[[str], list[str]]] = {
    _retrieval: re.compile(r"Paragraph (\d+)").findall,
    _retrieval_zh: re.compile(r"段落(\d+)").findall,
}


def _code_similarity(prediction: str, answer: str, classes: Sequence[str]) -> float:
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, code, answer).ratio()) / 100


METRICS: dict[str, Metric] = {
    "narrativeqa": qa_f1,
    "qasper": qa_f1,
    "multifieldqa_en": qa_f1,
    "multifieldqa_zh": _qa_f1_zh,
    "hotpotqa": qa_f1,
    "2wikimqa": qa_f1,
    "musique": qa_f1,
    "dureader": _rouge_zh,
    "gov_report": _rouge,
    "qmsum": _rouge,
    "multi_news": _rouge,
    "vcsum": _rouge_zh,
    "trec": _classification,
    "triviaqa": qa_f1,
    "samsum": _rouge,
    "lsht": _classification,
    "passage_count": _count_score,
    "passage_retrieval_en": _retrieval,
    "passage_retrieval_zh": _retrieval_zh,
    "lcc": _code_similarity,
    "repobench-p": _code_similarity,
}


def _f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _normal(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation and articles, with single spaces."""
    plain = "".join(char for char in text.lower() if char not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _normal_zh(token: str) -> str:
    return "".join("".join(char for char in token.lower() if char not in _ALL_PUNCTUATION).split())


def _segmented(text: str) -> str:
    return " ".join(_chinese_words(text))


def _chinese_words(text: str) -> Iterable[str]:
    return list(_jieba().cut(text, cut_all=False))


@cache
def _jieba() -> Any:
    try:
        import jieba
    except ImportError as error:
        raise KvbenchError(
            "scoring LongBench's Chinese tasks needs the package 'jieba', which is not installed.\n"
            "  hint: run pip install 'kvbench[longbench]', or set dataset=longbench_en"
        ) from error
    jieba.setLogLevel("WARNING")
    return jieba
