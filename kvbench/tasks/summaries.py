"""Summarization of long documents: Multi-LexSum and InfiniteBench's books, with prompts of a fixed number of tokens.

Source: QuantSpec (Tiwari et al. 2025, sec. 5.1 and appendix F) takes both from HELMET (Yen et al. 2024). Prompts are
made as in the converter of QuantSpec's first author: the end of the documents is cut off so that a prompt has exactly
the wanted length, records that are too short are skipped, and there is no chat wrapper. 90 tokens are generated. The
templates are in summaries.json. Scores are HELMET's: ROUGE-Lsum with stemming (rouge-score).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import DataError, LengthError
from kvbench.metrics.rouge import rouge
from kvbench.tasks import data
from kvbench.tasks.base import PromptRules, Sample, Setup, TokenTask
from kvbench.tasks.continuation import MOST_WARM_UP, SHORTEST, check_fits, check_lengths, check_warm_up, warmed
from kvbench.tasks.data import HubSource, Record
from kvbench.tasks.records import TEXT, TEXT_OR_NULL, TEXT_OR_TEXTS, TEXTS, TEXTS_OR_NULL, check_record, is_text
from kvbench.util.requirements import Package
from kvbench.util.schema import MOST_TOKENS, bounded

Kind = Literal["multi_lexsum", "infinitebench_sum"]


@dataclass(kw_only=True)
class Summaries(TokenTask):
    """Data set of long documents to summarize, Multi-LexSum or InfiniteBench's books, with prompts of exact lengths.

    Documents are cut off at the end to fit; records whose documents are too short for a length are skipped at this
    length.

    Args:
        kind: where the records come from, ``multi_lexsum`` or ``infinitebench_sum``. It selects the prompt template,
            and the fields that a record must have.
        path: a local file or folder; None downloads from the hub.
        split: name of the split. It replaces ``{task}`` in the `file` of `source`, and names the file in a local
            folder.
        lengths: prompt lengths in tokens.
        limit: number of scored prompts per length; None for all.
        warm_up: number of prompts per length that run before the scored ones to warm up the device. Only their peak
            memory appears in the results.
    """

    version = 1
    scorer_version = 1

    name: str = "multi_lexsum"
    kind: Kind = "multi_lexsum"
    path: str | None = None
    source: HubSource = field(default_factory=HubSource)
    split: str = "test"
    lengths: tuple[int, ...] = bounded((8192,), minimum=SHORTEST, maximum=MOST_TOKENS)
    limit: int | None = bounded(10, minimum=1)
    warm_up: int = bounded(3, minimum=0, maximum=MOST_WARM_UP)
    max_new_tokens: int = bounded(90, minimum=1, maximum=MOST_TOKENS)

    def check(self) -> None:
        """Raise ConfigError if an option is invalid.

        These are `source`, `split`, and `lengths`, which must not be empty or have repeated or too small values.
        """
        self.source.check()
        data.check_split("dataset.split", self.split)
        check_lengths(self.lengths)

    def packages(self) -> tuple[Package, ...]:
        """Return the package rouge-score, which computes the scores."""
        return (Package("rouge_score", "dataset", self.name, "run pip install rouge-score"),)

    def fits(self, config: Setup) -> None:
        """See :func:`check_fits`."""
        check_fits(config, self.lengths, self.max_new_tokens)

    @cached_property
    def records(self) -> list[tuple[str, tuple[str, ...]]]:
        """A pair for each record: the text to summarize, and its reference summaries; read on first use.

        Records without a text or without a summary are left out.

        Raises:
            DataError: the files cannot be read, or a record is malformed.
        """
        what = f"dataset {self.name}"
        file = data.find_records(self.source, self.split, self.path, what)
        fields = ("context", "answer") if self.kind == "infinitebench_sum" else ()
        documents: Mapping[str, Any] | None = None
        pairs = []
        for place, record in data.placed_records(file):
            check_record(record, fields, place)
            if "case_documents" in record and not record.get("sources") and documents is None:
                documents = self._documents(what)
            pairs.append(text_and_summaries(record, documents or {}, place))
        return [(text, answers) for text, answers in pairs if text.strip() and answers]

    def _documents(self, what: str) -> Mapping[str, Any]:
        """Return the court documents by id, which Multi-LexSum's releases keep in a separate file."""
        source = HubSource(
            hub_id=self.source.hub_id,
            revision=self.source.revision,
            file=self.source.file.replace("{task}", "sources"),
        )
        path = None if self.path is None else str(Path(self.path).parent if data.is_single(self.path) else self.path)
        file = data.find_records(source, "sources", path, what)
        documents = data.read_json(file)
        if not isinstance(documents, dict):
            raise DataError(f"{file}: expected a JSON object from ids to documents, not a {type(documents).__name__}.")
        return documents

    @cached_property
    def checksum(self) -> str:
        """Checksum of all texts and summaries (see :func:`kvbench.tasks.data.records_fingerprint`)."""
        return data.records_fingerprint(({"text": t, "answers": a} for t, a in self.records), ("text", "answers"))

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield the source with the split and, for Multi-LexSum, with ``sources``, the file of the court documents."""
        yield self.source, self.split
        if self.kind == "multi_lexsum":
            yield self.source, "sources"

    def samples(self) -> Iterator[Sample]:
        """Yield, for each length, the warm-up prompts and then up to `limit` scored prompts.

        Raises:
            LengthError: every record is too short for a length.
            DataError: all prompts of a length are used up by the warm-up.
        """
        for length in self.lengths:
            count = 0
            for number in range(len(self.records)):
                sample = self._sample(number, length)
                if sample is None:
                    continue
                count += 1
                yield warmed(sample, count <= self.warm_up)
                if self.limit is not None and count == self.warm_up + self.limit:
                    break
            if not count:
                raise self._too_short(length)
            check_warm_up(self.name, count, length, self.warm_up)

    def identity(self) -> dict[str, Any]:
        """Return the records' checksum, and the prompt's options.

        The tokenizer also affects the prompts, but it is part of the model's identity.
        """
        return {
            "target": self.kind,
            "version": self.version,
            "sha256": self.checksum,
            "lengths": list(self.lengths),
            "warm_up": self.warm_up,
            "max_new_tokens": self.max_new_tokens,
        }

    def notes(self) -> dict[str, Any]:
        """Return facts to store with the results: the number of records, of warm-up prompts, and the kind of ROUGE."""
        return {"records": len(self.records), "warm_up": self.warm_up, "rouge": "rouge-score, stemmed, Lsum"}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Score a summary against the references by each kind of ROUGE (:data:`kvbench.metrics.rouge.KINDS`).

        ``score`` is ROUGE-Lsum. All are between 0 and 1.
        """
        scores = rouge(prediction, sample.answers)
        return {"score": scores["rougeLsum"], **scores}

    def _too_short(self, length: int) -> DataError:
        """Return the error for a prompt length for which every record is too short."""
        tokenizer, template = self.tokenizer, summary_templates()[self.kind]
        if not self.records:
            return DataError(
                f"{self.name}: no record has both a text and a summary.\n  hint: set dataset.path to another file"
            )
        tail = len(tokenizer(template["after"], add_special_tokens=False)["input_ids"])
        if length < tail + 2:
            return DataError(
                f"{self.name}: prompts of {length} tokens are too short: the text after the documents "
                f"alone takes {tail} tokens.\n"
                "  hint: increase dataset.lengths"
            )
        wholes = (template["before"] + text + template["after_context"] for text, _ in self.records)
        longest = tail + max(len(tokenizer(whole, verbose=False)["input_ids"]) for whole in wholes)
        return LengthError(
            f"{self.name}: none of {len(self.records)} records fills a prompt of {length} tokens; the longest has "
            f"{longest}.\n  hint: set dataset.lengths to at most [{longest}]"
        )

    def _sample(self, number: int, length: int) -> Sample | None:
        """Return the sample of a record, with a prompt of exactly `length` tokens; None if the record is too short."""
        tokenizer, template = self.tokenizer, summary_templates()[self.kind]
        text, answers = self.records[number]
        before = template["before"]
        tail = list(tokenizer(template["after"], add_special_tokens=False)["input_ids"])
        room = length - len(tail)  # for the documents and the text before them
        whole = before + text + template["after_context"]
        # tokenizing the beginning usually suffices: few texts have more than 12 characters per token
        for head in (whole[: 12 * length], whole):
            encoded = tokenizer(head, return_offsets_mapping=True, verbose=False)
            ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
            if len(ids) >= room:
                break
        if len(ids) < room or room < 2:
            return None
        last = min(len(before) + len(text), offsets[room - 1][1])
        inside = [i for i, (a, b) in enumerate(offsets[:room]) if len(before) <= a < b <= last]
        return Sample(
            id=f"{self.kind}@{length}/{number}",
            task=self.kind,
            length=length,
            prompt=head[: offsets[room - 1][1]] + template["after"],
            answers=answers,
            max_new_tokens=self.max_new_tokens,
            truncation="refuse",
            rules=PromptRules(ids=(*ids[:room], *tail), ids_context=(inside[0], inside[-1] + 1) if inside else None),
            target=f" {answers[0]}",
        )


def summary_templates() -> dict[str, dict[str, str]]:
    """Return the prompt templates, keyed by kind of data set; each is a dict of three texts.

    A prompt is ``before``, the documents, ``after_context`` and ``after``. To shorten it to its length, text is cut off
    in front of ``after``: first ``after_context``, then the end of the documents.
    """
    path = Path(__file__).with_name("summaries.json")
    by_kind: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return by_kind


def text_and_summaries(record: Record, documents: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """Extract the text to summarize and the reference summaries from a record of any supported form.

    The forms differ in the names of their fields: ``context`` and ``answer`` (InfiniteBench), ``sources`` and
    ``summary/short`` (Multi-LexSum on the hub), ``case_documents`` and ``summary/short`` (Multi-LexSum's own release),
    or ``document`` and ``summary``. The release's court documents are keyed by the ids that ``case_documents`` lists.

    Returns:
        The text, with several documents joined by blank lines, and the summaries that are not blank. Either may be
        empty.

    Raises:
        DataError: the record has none of these forms, a value is of the wrong kind, or a document is missing.
    """
    if "context" in record and "answer" in record:
        check_record(record, {"context": TEXT, "answer": TEXT_OR_TEXTS}, where)
        answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
        return record["context"], _not_blank(answers)
    if "case_documents" in record or "sources" in record:
        summary = {"summary/short": record.get("summary/short")}
        check_record(summary, {"summary/short": TEXT_OR_NULL}, where)
        if record.get("sources"):
            check_record(record, {"sources": TEXTS}, where)
            texts = record["sources"]
        else:
            check_record(record, {"case_documents": TEXTS_OR_NULL}, where)
            texts = [_document(documents, name, where) for name in record["case_documents"] or ()]
        return "\n\n".join(texts), _not_blank(summary.values())
    if "document" in record and "summary" in record:
        check_record(record, {"document": TEXT_OR_NULL, "summary": TEXT_OR_NULL}, where)
        return record["document"] or "", _not_blank([record["summary"]])
    raise DataError(
        f"{where}: a record needs one of these pairs of fields: 'context' and 'answer'; 'sources' and 'summary/short'; "
        "'case_documents' and 'summary/short'; 'document' and 'summary' "
        f"(this record has {', '.join(record)})."
    )


def _not_blank(texts: Iterable[str | None]) -> tuple[str, ...]:
    """Return the texts that are not blank; a blank reference would give every summary a score of 0."""
    return tuple(text for text in texts if text and text.strip())


def _document(documents: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text of one court document. Raises DataError if it is missing or has no text."""
    document = documents.get(name)
    if document is None:
        raise DataError(f"{where}: document '{name}' is not in sources.json.")
    if not isinstance(document, dict) or not is_text(document.get("doc_text")):
        raise DataError(f"{where}: document '{name}' of sources.json has no field 'doc_text' with a string.")
    return str(document["doc_text"])
