"""Wrappers of a context: an instruction before it and, as in LongBench, often another one after it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrapper:
    """The instructions that a prompt puts before and after its context, without whitespace at their ends.

    `tail`, between the context and the question, is empty for none.
    """

    head: str
    tail: str = ""


#: the wrappers of `mini`'s samples, by style of task
WRAPPERS = {
    "qa": Wrapper(
        "Read the text below and answer the question about it. Give only the answer.",
        "Answer the question from the text above. Give only the answer and no other words.",
    ),
    "few_shot": Wrapper("Find the label of the last text. Here are some examples of texts and their labels."),
    "problems": Wrapper("Read the text below, then solve the last problem step by step, as the examples do."),
    "code": Wrapper("Complete the line of code as it stands in the code below."),
}

#: other wordings, also used in the bundled model's training data, so that the model does not depend on one
VARIANTS = {
    "qa": (
        Wrapper(
            "Answer the question based on the given passages. Only give me the answer and do not output any other"
            " words.\n\nThe following are given passages.",
            "Answer the question based on the given passages. Only give me the answer and do not output any other"
            " words.",
        ),
        Wrapper(
            "Read the following text and answer briefly.",
            "Now, answer the following question based on the above text, only give me the answer and do not output"
            " any other words.",
        ),
        Wrapper("Some special information is hidden in the text. Memorize it. I will ask about it afterwards."),
        Wrapper("Text:"),
    ),
    "few_shot": (
        Wrapper("Please determine the type of the text below. Here are some examples."),
        Wrapper("Texts and labels:"),
    ),
    "problems": (
        Wrapper("Answer the last problem after the examples."),
        Wrapper("Text and problems:"),
    ),
    "code": (
        Wrapper("Please complete the code given below."),
        Wrapper("# a module"),
    ),
}
