"""mini: pinned bytes, spans, lengths, no sentence twice, and what a wrong configuration says."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvbench.errors import ConfigError
from kvbench.tasks import load
from kvbench.tasks.mini import Mini, reasoning
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.task import ASKING, HARD, TASKS
from kvbench.tasks.mini.tokens import encoder
from kvbench.tasks.mini.vocabulary import WORDS

#: SHA-256 (16 digits) of prompt, target and spans of sample 0 at 1024 tokens, seed 0; a change means a new `version`
PINNED: dict[str, str] = {
    "passkey": "561a056938bd34a7",
    "needle": "02ee9dd388d3ddd3",
    "needle_words": "74e478ea430d56b1",
    "key_value": "1ea449a57b4f6e23",
    "key_value_hex": "0404faec12e09150",
    "multi_value": "59408be17d39f1e0",
    "variable_tracking": "5ca8d3bc3525c348",
    "two_hop": "8fff8b7157a7d0c2",
    "facts": "5c0e2ed338d64ab1",
    "few_shot": "9e63b6839d1e4926",
    "copy": "4eb99489f0bfe56e",
    "copy_long": "dd9a1a6ec3e59ef0",
    "repeat": "9f09511565350c9e",
    "passage": "a49a05a8b9e6ba7e",
    "arithmetic": "29ff44725ea82165",
    "code_line": "98a232cdbb108b7b",
    "several": "412eeae4d3032f0d",
    "pairs": "56626537993db6ce",
    "lists": "1d6eae88a2dfb53d",
    "many": "bc71bebd5666824a",
    "strings": "e0add80835538014",
    "copies": "9c843b97c3eb1e0f",
}


def digest(sample) -> str:
    text = "\x1f".join((sample.prompt, sample.target, str(sample.context_span), str(sample.meta["answer_spans"])))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", TASKS)
def test_bytes_are_pinned(name):
    assert digest(Mini().sample(name, 1024, 0)) == PINNED[name]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_length_in_tokens(name, length):
    encode = encoder()
    for index in range(2):
        sample = Mini().sample(name, length, index)
        used = 1 + len(encode([sample.prompt])[0]) + sample.max_new_tokens
        assert length - 24 <= used <= length
        assert len(encode([sample.target + "\n"])[0]) <= sample.max_new_tokens


@pytest.mark.parametrize("name", TASKS)
def test_spans_and_answers(name):
    for index in range(5):
        sample = Mini().sample(name, 1024, index)
        start, end = sample.context_span
        context = sample.prompt[start:end]
        assert 0 < start < end < len(sample.prompt)
        assert not context[0].isspace()
        assert not context[-1].isspace()
        assert sample.prompt[:start].endswith("\n")
        assert sample.query in sample.prompt[end:]
        assert sample.target.strip() == sample.answers[0]
        for a, b in sample.meta["answer_spans"]:
            assert start <= a < b <= end
            assert sample.prompt[a:b].strip() in sample.answers[0]
        if name == "arithmetic":  # the only task whose answer is not in the context
            assert sample.meta["answer_spans"] == []
            assert sample.meta["depth"] is None
        else:
            assert 0.0 <= sample.meta["depth"] < 1.0
        # the question does not give the answer away
        assert sample.answers[0] not in sample.prompt[end:]


@pytest.mark.parametrize("name", ["passkey", "copy_long", "passage", "several", "code_line"])
def test_no_sentence_twice(name):
    sample = Mini().sample(name, 4096, 1)
    start, end = sample.context_span
    context = sample.prompt[start:end]
    if name == "code_line":
        units = re.findall(r"^def .*$", context, flags=re.M)
    else:
        units = [unit for unit in re.split(r"(?<=[.!?])\s+", context) if len(unit) > 25]
    assert len(units) > 10
    assert len(set(units)) == len(units)


def test_answer_of_code_line_is_unique_in_the_context():
    for index in range(5):
        sample = Mini().sample("code_line", 2048, index)
        context = sample.prompt[slice(*sample.context_span)]
        assert context.count(sample.query) == 1


def test_keys_are_asked_for_once_in_the_context():
    for name, lines in (("key_value", 64), ("key_value_hex", 64)):
        sample = Mini().sample(name, 4096, 0)
        context = sample.prompt[slice(*sample.context_span)]
        key = re.search(r"key (\S+)\?", sample.query)[1]
        assert context.count(f"{key}: ") == 1
        assert len(re.findall(r"^\S+: \S+$", context, flags=re.M)) == lines


def test_vocabulary_is_large():
    assert len(WORDS) >= 2000


def test_samples_do_not_depend_on_the_limit_and_the_order():
    small = list(Mini(tasks=("needle", "copy"), lengths=(512,), limit=2).samples())
    large = list(Mini(tasks=("copy", "needle"), lengths=(512, 1024), limit=3).samples())
    assert [s.id for s in small] == ["needle@512/0", "needle@512/1", "copy@512/0", "copy@512/1"]
    by_id = {s.id: s for s in large}
    assert all(by_id[s.id] == s for s in small)
    assert small[0].prompt != small[1].prompt
    assert Mini(seed=1).sample("needle", 512, 0).prompt != small[0].prompt


def test_same_bytes_under_another_hash_seed():
    code = (
        "import hashlib; from kvbench.tasks.mini import Mini; m = Mini(tasks=('few_shot', 'code_line'), lengths=(512,),"
        " limit=2); print(hashlib.sha256(repr(list(m.samples())).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_several_questions_share_their_context():
    task = Mini()
    sample = task.sample("several", 1024, 0)
    questions, shared = sample.work.questions, sample.work.shared
    assert len(questions) == 8
    assert sample.prompt == sample.prompt[:shared] + questions[0].prompt
    assert len({q.answer for q in questions}) == 8
    assert shared == sample.context_span[1]
    right = [q.answer for q in questions]
    assert task.score_questions(sample, right) == {"score": 1.0, "all": 1.0}
    assert task.score_questions(sample, [*right[:7], "0"]) == {"score": 7 / 8, "all": 0.0}
    with pytest.raises(ValueError):
        task.score_questions(sample, right[:3])


@pytest.mark.parametrize(
    ("name", "questions"), [("pairs", 16), ("lists", 3), ("many", 32), ("strings", 4), ("copies", 4)]
)
def test_hard_tasks_want_all_answers_right(name, questions):
    task = Mini()
    sample = task.sample(name, 2048, 0)
    right = [question.answer for question in sample.work.questions]
    assert len(set(right)) == len(right) == questions
    assert all(part in sample.prompt[: sample.work.shared] for answer in right for part in answer.split(", "))
    assert task.score_questions(sample, right) == {"score": 1.0, "questions": 1.0, "all": 1.0}
    wrong = {"score": 0.0, "questions": (questions - 1) / questions, "all": 0.0}
    assert task.score_questions(sample, ["0", *right[1:]]) == wrong


def test_all_names_the_tasks_that_are_not_hard():
    assert set(Mini(tasks="all").names) == set(TASKS) - set(HARD)
    assert Mini(tasks="hard").names == HARD


@pytest.mark.parametrize("name", TASKS)
def test_right_and_wrong_answers(name):
    task = Mini()
    sample = task.sample(name, 512, 0)
    assert task.score(sample, sample.target + "\nmore")["score"] == 1.0
    assert task.score(sample, "")["score"] == 0.0
    assert task.score(sample, "nothing of the kind 1")["score"] == 0.0


def test_multi_value_is_scored_by_recall():
    task = Mini()
    sample = task.sample("multi_value", 512, 0)
    first, second, third = sample.meta["parts"]
    assert task.score(sample, f" {third}, {first}")["score"] == pytest.approx(2 / 3)
    assert task.score(sample, f"{second}1 {first}")["score"] == pytest.approx(1 / 3)
    assert task.score(sample, f"{second}, {first}, {third}") == {"score": 1.0, "exact": 0.0}


def test_identity_names_what_determines_the_samples():
    identity = Mini(limit=3).identity()
    assert identity == Mini(limit=9).identity()
    assert identity != Mini(seed=1).identity()
    assert len(identity["tokenizer"]) == 16


CONFIG = {"_target_": "kvbench.tasks.mini.Mini", "tasks": ["needle"], "lengths": [1024]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["nedle"]}, "did you mean 'needle'"),
        ({"tasks": "key_vaule"}, "did you mean 'key_value'"),
        ({"tasks": []}, "must not be empty"),
        ({"tasks": ["copy", "copy"]}, "twice"),
        ({"lengths": [1000]}, "did you mean '1024'"),
        ({"lengths": [256]}, "did you mean '512'"),
        ({"lengths": []}, "must not be empty"),
        ({"lengths": ["long"]}, "whole number"),
        ({"limit": 0}, "at least 1"),
        ({"limt": 3}, "did you mean 'limit'"),
        ({"seed": -1}, "at least 0"),
        ({"_target_": "kvbench.tasks.mini.Minni"}, "cannot be imported"),
        ({"_target_": None}, "must be the full name of a class"),
    ],
)
def test_wrong_configurations_are_refused(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        load({**CONFIG, **change})
    assert str(error.value).startswith("dataset.")


def test_turns_are_scored_by_their_mean_and_ends_and_belong_to_the_identity():
    made = [load({**CONFIG, "tasks": ["pairs"], "lengths": [512], "turns": turns}) for turns in ("separate", "stored")]
    separate, stored = (next(iter(task.samples())) for task in made)
    assert separate.prompt == stored.prompt and stored.work == replace(separate.work, turns="stored")
    right = [question.answer for question in stored.work.questions]
    assert made[0].score_questions(separate, [*right[:-1], "x"])["score"] == 0.0
    scores = {"score": 1 - 1 / len(right), "all": 0, **{f"turn{n:02}": 1.0 for n in range(1, 13)}}
    assert made[1].score_questions(stored, [*right[:-1], "x"]) == pytest.approx({**scores, "turn12": 0.0})
    assert {**made[0].identity(), "turns": "stored"} == made[1].identity() != made[0].identity()
    with pytest.raises(ConfigError, match="has no effect on needle"):
        load({**CONFIG, "tasks": ["needle"], "turns": "anew"})
    own = load({**CONFIG, "tasks": ["pairs"], "lengths": [512], "turns": "stored", "history": "own"})
    assert next(iter(own.samples())).work == replace(stored.work, history="own")
    assert own.identity() == {**made[1].identity(), "history": "own"}
    with pytest.raises(ConfigError, match="has no effect on questions that see no other"):
        load({**CONFIG, "tasks": ["pairs"], "history": "own"})


@pytest.mark.parametrize("name", ASKING)
def test_tasks_with_one_question_can_ask_more(name):
    one, four = (load({**CONFIG, "tasks": [name], "lengths": [1024], "questions": count}) for count in (1, 4))
    sample = next(iter(four.samples()))
    asked = sample.work.questions
    assert len(asked) == (3 if name == "multi_value" else 4)  # 12 records hold three lists
    assert len({question.prompt for question in asked}) == len(asked)
    assert {**one.identity(), "questions": 4} == four.identity()
    right = [question.answer for question in asked]
    assert four.score_questions(sample, right)["score"] == 1.0
    for question in asked:
        assert all(sample.prompt[start:end] in question.answer for start, end in question.meta["answer_spans"])
    with pytest.raises(ConfigError, match=r"dataset\.questions.*has no effect on passkey"):
        load({**CONFIG, "tasks": ["passkey"], "questions": 4})


CONF = Path(__file__).parents[2] / "conf" / "dataset"


@pytest.mark.parametrize("path", [CONF / "mini.yaml", *sorted((CONF / "mini").glob("*.yaml"))], ids=lambda p: p.stem)
def test_every_preset_loads(path):
    text = path.read_text()
    assert text.startswith("# ")
    task = load(yaml.safe_load(text))
    assert ("questions:" in text) == (path.stem in (*ASKING, "turns"))  # keys of a preset can be typed as they are
    name = str(path.relative_to(CONF).with_suffix(""))
    assert task.name == name
    if name not in ("mini", "mini/full", "mini/turns"):
        assert task.names == (HARD if path.stem == "hard" else (path.stem,))
    assert task.limit == (100 if name == "mini/full" else 8)  # a single task is as quick to try as all five of mini


def test_there_is_a_preset_for_every_task():
    assert {path.stem for path in (CONF / "mini").glob("*.yaml")} == {"full", "hard", "turns", *TASKS}


def test_loading_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from kvbench.tasks import load; load({'_target_': 'kvbench.tasks.mini.Mini'});"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("noun", "plural"),
    [
        ("berry", "berries"),
        ("toy", "toys"),
        ("box", "boxes"),
        ("brush", "brushes"),
        ("watch", "watches"),
        ("saw", "saws"),
    ],
)
def test_things_of_a_word_problem_stand_in_the_plural(noun, plural, monkeypatch):
    monkeypatch.setattr(reasoning, "_NOUNS", (noun,))
    text, solution = reasoning.problem(Rng("plural"), 3)
    assert re.search(rf"has \d+ {plural}\. ", text) and re.search(rf"How many {plural} do", text)
    assert re.search(r"#### \d+$", solution)
