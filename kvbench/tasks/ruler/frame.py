"""The 13 tasks of RULER: their settings, prompt templates, answer lengths and scores.

Source: NVIDIA/RULER c3f5e3b, scripts/synthetic.yaml and scripts/data/synthetic/constants.py. The templates are the
definition of the benchmark and are quoted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Haystack = Literal["noise", "essay", "needle"]

NIAH = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz you"
    " about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query}"
    " mentioned in the provided text?"
)
NIAH_PREFIX = " The special magic {type_needle_v} for {query} mentioned in the provided text are"
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find"
    " all variables that are assigned the value {query} in the text above."
)
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the"
    " value {query}, they are: "
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
    " appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared"
    " coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the"
    " three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
QA = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me"
    " the answer and do not output any other words.\n\nQuestion: {query}"
)
QA_PREFIX = " Answer:"

#: chat formats around a task's template; the answer prefix follows them, so it begins the model's turn
CHAT = {
    "base": "{task}",
    "llama2": "[INST] {task} [/INST]",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{task}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "phi3": "<|user|>\n{task}<|end|>\n<|assistant|>\n",
}

#: sentences of the noise haystack
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

#: maximum number of tokens of an answer, by generator
BUDGETS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@dataclass(frozen=True)
class RulerKind:
    """Settings of one task.

    Args:
        generator: name of the generator: ``niah``, ``vt``, ``cwe``, ``fwe`` or ``qa``.
        haystack: text around the needles (niah): a repeated noise paragraph, essays, or other needles.
        key: kind of the needles' keys, ``words`` or ``uuids``. The kind of their values is ``numbers`` or ``uuids``.
        values: number of values of each key.
        queries: number of keys that are asked for.
        questions: data set of the questions (qa): ``squad`` or ``hotpotqa``.
    """

    generator: str
    haystack: Haystack = "noise"
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    questions: str = ""

    @property
    def budget(self) -> int:
        """Maximum number of tokens of an answer."""
        return BUDGETS[self.generator]

    @property
    def needs_text(self) -> bool:
        """True if the task needs a text or questions that are not part of kvbench: essays, SQuAD or HotpotQA."""
        return bool(self.questions) or (self.generator == "niah" and self.haystack == "essay")


#: the tasks, in RULER's order
KINDS = {
    "niah_single_1": RulerKind("niah"),
    "niah_single_2": RulerKind("niah", "essay"),
    "niah_single_3": RulerKind("niah", "essay", value="uuids"),
    "niah_multikey_1": RulerKind("niah", "essay", keys=4),
    "niah_multikey_2": RulerKind("niah", "needle"),
    "niah_multikey_3": RulerKind("niah", "needle", "uuids", "uuids"),
    "niah_multivalue": RulerKind("niah", "essay", values=4),
    "niah_multiquery": RulerKind("niah", "essay", keys=4, queries=4),
    "vt": RulerKind("vt"),
    "cwe": RulerKind("cwe"),
    "fwe": RulerKind("fwe"),
    "qa_1": RulerKind("qa", questions="squad"),
    "qa_2": RulerKind("qa", questions="hotpotqa"),
}
