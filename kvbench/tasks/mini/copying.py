"""Tasks that repeat part of the context word for word: marked passages, random strings, lines of code."""

from __future__ import annotations

from kvbench.tasks.mini import code, vocabulary
from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.compose import Draft, DraftQuestion, Setting
from kvbench.tasks.mini.retrieval import ask, locate_value, look_up
from kvbench.tasks.mini.rng import Rng


def _marked(setting: Setting, n: int, n_words: int) -> Draft:
    rng = setting.rng
    keys = vocabulary.distinct(n, lambda: vocabulary.random_key(rng))
    passages = [setting.writer.passage(n_words) for _ in range(n)]
    # cut to the same number of words, so that all passages of a task take about the same number of decode steps
    passages = [" ".join(text.split(" ")[:n_words]).rstrip(".,;:") for text in passages]
    return look_up(setting, keys, passages, "Passage {}: {}.", "What does the passage {} say, word for word?")


def copy(setting: Setting) -> Draft:
    """Generate the task ``copy``: the model must repeat one of four marked passages word for word.

    Each passage is a record of 20 words (about 32 tokens) that begins with ``Passage`` and a name, and the question
    names one.
    """
    return _marked(setting, setting.count(4, 100), setting.size(20, 6, 30))


def copy_long(setting: Setting) -> Draft:
    """Generate the task ``copy_long``: like ``copy``, but with passages of 60 words (about 96 tokens).

    Samples of fewer than 1,200 tokens have fewer than four passages.
    """
    return _marked(setting, setting.count(4, 300), setting.size(60, 30, 70))


def copies(setting: Setting) -> Draft:
    """Generate the task ``copies``: ``copy_long`` with a question about every passage, all of which must be right."""
    if not setting.vary:
        setting.questions = 4
    return copy_long(setting)


def _item(rng: Rng) -> str:
    kind = rng.below(3)
    if kind == 0:
        return vocabulary.digits(rng, rng.between(1, 3))
    return rng.choice(words.TOOLS) if kind == 1 else vocabulary.label(rng)


def repeat(setting: Setting) -> Draft:
    """Generate the task ``repeat``: the model must continue one of four random strings, given its beginning.

    A string is a record of 20 items (about 48 tokens), each a number, a noun or a made-up word, so its continuation
    cannot be guessed. The question quotes the first four items, and the answer is the other sixteen.
    """
    return _strings(setting, setting.count(4, 150), setting.size(20, 8, 28))


def strings(setting: Setting) -> Draft:
    """Generate the task ``strings``: ``repeat`` with a question about each of four strings, all of which must be right.

    A string has 28 items, the most that the bundled model was trained on; the answer is the last 24 (about 60 tokens).
    """
    if not setting.vary:
        setting.questions = 4
    return _strings(setting, setting.count(4, 150), setting.size(28, 8, 28))


def _strings(setting: Setting, n: int, size: int) -> Draft:
    rng, given = setting.rng, setting.size(4, 3, 6)
    strings = [[_item(rng) for _ in range(size)] for _ in range(n)]
    records = [f"String: {' '.join(items)}." for items in strings]
    questions = []
    for i in setting.pick(n):
        start, rest = " ".join(strings[i][:given]), " ".join(strings[i][given:])
        questions.append(ask(f"How does this string go on? {start}", rest, locate_value(records[i], i, rest)))
    return Draft("qa", records, questions)


def code_line(setting: Setting) -> Draft:
    """Generate the task ``code_line``: the model must complete a line of code that occurs in the context.

    Each record is a generated function that contains one assignment to a variable with a unique name. The question
    quotes such a line up to the name, and the answer is the rest of the line.
    """
    rng, n = setting.rng, setting.count(6, 300)
    lines = {line.prefix: line for line in (code.call(rng) for _ in range(n))}
    calls = list(lines.values())
    records = [code.function(rng, line) for line in calls]
    questions = []
    for i in setting.pick(len(calls)):
        line = calls[i]
        start = records[i].index(line.prefix) + len(line.prefix)
        questions.append(
            DraftQuestion(
                f"\n\n# the same line again\n{line.prefix}",
                line.prefix.strip(),
                line.rest,
                ((i, start, start + len(line.rest)),),
                glued=True,
            )
        )
    return Draft("code", records, questions, code=True)
