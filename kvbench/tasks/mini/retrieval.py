"""Tasks that look something up: a pass key, needles, key-value pairs, several values of one key, facts, passages."""

from __future__ import annotations

from kvbench.tasks.mini import vocabulary
from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.compose import Draft, DraftQuestion, Setting
from kvbench.tasks.mini.prose import article


def ask(query: str, answer: str, *evidence: tuple[int, int, int], parts: tuple[str, ...] = ()) -> DraftQuestion:
    """Return a question whose prompt has the usual form: ``Question: ...`` on one line and ``Answer:`` on the next.

    `evidence` are places as :func:`locate_value` returns them.
    """
    return DraftQuestion(f"\n\nQuestion: {query}\nAnswer:", query, answer, evidence, parts=parts)


def locate_value(record: str, index: int, value: str) -> tuple[int, int, int]:
    """Locate the last occurrence of a value in the record with this index, as an entry for :attr:`Question.evidence`.

    Raises:
        ValueError: `record` does not contain `value`.
    """
    start = record.rindex(value)
    return index, start, start + len(value)


def look_up(setting: Setting, keys: list[str], values: list[str], record: str, query: str) -> Draft:
    """Return a draft in which each record states a key's value, and each question asks for the value of one key.

    `record` is a template with ``{}`` for key and for value, in this order; `query` one with ``{}`` for the key.
    """
    records = [record.format(k, v) for k, v in zip(keys, values, strict=True)]
    questions = [
        ask(query.format(keys[i]), values[i], locate_value(records[i], i, values[i])) for i in setting.pick(len(keys))
    ]
    return Draft("qa", records, questions)


def passkey(setting: Setting) -> Draft:
    """Generate the task ``passkey``: the model must find a five-digit number, which one record states twice.

    Source: Mohtashami and Jaggi 2023, "Landmark Attention".
    """
    key = vocabulary.digits(setting.rng, 5)
    record = f"The pass key is {key}. Remember it. {key} is the pass key."
    first = record.index(key)
    evidence = ((0, first, first + 5), locate_value(record, 0, key))
    return Draft("qa", [record], [ask("What is the pass key in the text?", key, *evidence)])


def needle(setting: Setting) -> Draft:
    """Generate the task ``needle``: the model must find the seven-digit number of one of 16 keys.

    Each key and its number stand in a sentence of their own among the filler. Source: RULER (Hsieh et al. 2024).
    """
    rng, n = setting.rng, setting.count(16, 60)
    keys = vocabulary.distinct(n, lambda: vocabulary.random_key(rng))
    values = vocabulary.distinct(n, lambda: vocabulary.digits(rng, 7))
    record, query = "One of the special magic numbers for {} is: {}.", "What is the special magic number for {}?"
    return look_up(setting, keys, values, record, query)


def needle_words(setting: Setting) -> Draft:
    """Generate the task ``needle_words``: like ``needle``, but the values are pairs of words, not numbers."""
    rng, n = setting.rng, setting.count(16, 60)
    keys = vocabulary.distinct(n, lambda: vocabulary.random_key(rng))
    values = vocabulary.distinct(n, lambda: vocabulary.random_pair(rng))
    return look_up(setting, keys, values, "The secret words for {} are: {}.", "What are the secret words for {}?")


def _draft_pairs(setting: Setting, keys: list[str], values: list[str]) -> Draft:
    return look_up(setting, keys, values, "{}: {}", "What is the value of the key {}?")


def key_value(setting: Setting) -> Draft:
    """Generate the task ``key_value``: the model must look up the value of one of 64 keys.

    Each record is a line such as ``rusty-lantern: 482193``. Samples of fewer than 2,560 tokens have fewer lines.
    """
    rng, n = setting.rng, setting.count(64, 40, least=2)
    return _draft_pairs(
        setting,
        vocabulary.distinct(n, lambda: vocabulary.random_key(rng)),
        vocabulary.distinct(n, lambda: vocabulary.digits(rng, 6)),
    )


def key_value_hex(setting: Setting) -> Draft:
    """Generate the task ``key_value_hex``: the model must look up the value of one of 64 hexadecimal keys.

    Each record is a line such as ``a3f91c: 93bd04e1a77c``. The task is harder than ``key_value``, because the keys look
    alike and the values are longer. Samples of fewer than 3,584 tokens have fewer lines.
    """
    rng, n = setting.rng, setting.count(64, 56, least=2)
    return _draft_pairs(
        setting,
        vocabulary.distinct(n, lambda: vocabulary.hexadecimal(rng, 6)),
        vocabulary.distinct(n, lambda: vocabulary.hexadecimal(rng, 12)),
    )


def several(setting: Setting) -> Draft:
    """Generate the task ``several``: ``key_value_hex`` with eight questions about one context, each about another key.

    Training samples ask :attr:`Setting.questions` questions instead.
    """
    if not setting.vary:
        setting.questions = 8
    return key_value_hex(setting)


def many(setting: Setting) -> Draft:
    """Generate the task ``many``: ``key_value_hex`` with 32 questions about one context, all of which must be right.

    Samples of fewer than 1,792 tokens have fewer than 32 lines, and ask about all of them.
    """
    if not setting.vary:
        setting.questions = 32
    return key_value_hex(setting)


def pairs(setting: Setting) -> Draft:
    """Generate the task ``pairs``: ``key_value`` with 16 questions about one context, all of which must be right."""
    if not setting.vary:
        setting.questions = 16
    return key_value(setting)


def lists(setting: Setting) -> Draft:
    """Generate the task ``lists``: ``multi_value`` with questions about three keys, all of which must be right.

    Samples of fewer than 600 tokens ask about fewer keys.
    """
    if not setting.vary:
        setting.questions = 3
    return multi_value(setting)


def multi_value(setting: Setting) -> Draft:
    """Generate the task ``multi_value``: the model must list all values of one key, in the order of the text.

    Three of the 12 records give a value of this key, and the question says how many there are.
    """
    rng, wanted = setting.rng, setting.size(3, 2, 4)
    most = setting.count(12, 60, least=wanted + 1)
    groups = min(setting.questions, max(1, (most - 1) // wanted))
    n = max(most, groups * wanted + 1)
    others = vocabulary.distinct(n - groups * (wanted - 1), lambda: vocabulary.random_key(rng))
    keys = [key for key in others[:groups] for _ in range(wanted)] + others[groups:]
    values = vocabulary.distinct(n, lambda: vocabulary.digits(rng, 7))
    order = rng.sample(range(n), n)
    records = [f"One of the special magic numbers for {keys[i]} is: {values[i]}." for i in order]
    questions = []
    for key in others[:groups]:
        asked = [place for place, i in enumerate(order) if keys[i] == key]
        parts = tuple(values[order[place]] for place in asked)
        query = f"What are the {wanted} special magic numbers for {key}, in the order of the text?"
        evidence = (locate_value(records[place], place, part) for place, part in zip(asked, parts, strict=True))
        questions.append(ask(query, ", ".join(parts), *evidence, parts=parts))
    return Draft("qa", records, questions, ordered=True)


def facts(setting: Setting) -> Draft:
    """Generate the task ``facts``: the model must recall one fact about one of 12 made-up people.

    The context gives the occupation, birth, favourite dish and pet of each person, in separate sentences.
    """
    rng, n = setting.rng, setting.count(12, 100)
    records: list[str] = []
    pool: list[DraftQuestion] = []
    for who in vocabulary.distinct(n, lambda: vocabulary.person(rng)):
        job = f"{rng.choice(words.MATERIALS)} {rng.choice(words.PEOPLE)}"
        born = f"{vocabulary.town(rng)} in {rng.between(1700, 1999)}"
        dish = f"{rng.choice(words.FOODS)} with {rng.choice(words.FOODS)}"
        pet = vocabulary.random_pair(rng)
        for record, query, answer in (
            (f"{who} works as {article(job)}.", f"What does {who} work as?", job),
            (f"{who} was born in {born}.", f"Where and when was {who} born?", born),
            (f"{who} likes to eat {dish}.", f"What does {who} like to eat?", dish),
            (f"{who} keeps a pet called the {pet}.", f"What is the pet of {who} called?", pet),
        ):
            pool.append(ask(query, answer, locate_value(record, len(records), answer)))
            records.append(record)
    return Draft("qa", records, [pool[i] for i in setting.pick(len(pool))])


def passage(setting: Setting) -> Draft:
    """Generate the task ``passage``: the model must say which of 20 tagged passages ends with a given sentence.

    The answer is the passage's tag, a random four-digit number at its end. A tag at its beginning would make the task
    too hard: a small model does not learn to look back from the sentence to the tag.
    """
    rng, n = setting.rng, setting.count(20, 200, least=2)
    tags = vocabulary.distinct(n, lambda: vocabulary.digits(rng, 4))
    last = [setting.writer.sentence() for _ in range(n)]
    records = [
        f"{setting.writer.passage(setting.size(20, 1, 40))} {end} [passage {tag}]"
        for end, tag in zip(last, tags, strict=True)
    ]
    questions = [
        ask(f"Which passage ends with these words? {last[i]}", tags[i], locate_value(records[i], i, tags[i]))
        for i in setting.pick(n)
    ]
    return Draft("qa", records, questions)
