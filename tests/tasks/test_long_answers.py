"""Data sets of long answers: generated records in each layout, prompts, several answers, refusals, private sets."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from kvbench.cli import report
from kvbench.errors import ConfigError, DataError
from kvbench.models.load import byte_tokenizer
from kvbench.results.aggregate import scores
from kvbench.results.notes import notes
from kvbench.results.samples import outputs, read_samples, sealed, unsealed
from kvbench.runner.prompting import encode_prompt, wrapper
from kvbench.runner.remarks import shown_excerpts
from kvbench.runner.rows import head
from kvbench.runner.run import answer_run
from kvbench.runner.scoring import rescored
from kvbench.runner.session import Session
from kvbench.runner.two_requests import answer_request
from kvbench.tasks import load
from kvbench.tasks.base import Sample
from kvbench.util.confdir import group_options
from tests.endpoint.serving import of_endpoint, serving
from tests.run_files import on_disk, store_of
from tests.run_support import config

MESSAGES = [
    ("user", "Write a poem about tapirs."),
    ("assistant", "Round and quiet."),
    ("user", "Prepend x9 to the 1st."),
]


def mrcr(characters: int, needles: int = 2) -> dict[str, Any]:
    turns = [{"role": role, "content": text} for role, text in MESSAGES]
    texts = {"prompt": json.dumps(turns), "answer": "x9Round and quiet.", "random_string_to_prepend": "x9"}
    return {**texts, "n_needles": needles, "n_chars": characters, "total_messages": 3, "desired_msg_index": 1}


def question(number: int) -> dict[str, Any]:
    letters = {f"choice_{letter}": f" {letter.lower()}{number} " for letter in "ABCD"}
    kinds = {"difficulty": ("easy", "hard")[number % 2], "length": ("short", "medium", "long")[number % 3]}
    return {"_id": str(number), "question": f"Why {number}? ", "answer": "B", "context": " Once. ", **letters, **kinds}


def expert(number: int) -> dict[str, str]:
    wrong = {f"Incorrect Answer {n}": f"wrong {n} of {number}" for n in (1, 2, 3)}
    return {"Question": f"Quagmirosaurus number {number}?", "Correct Answer": f"right of {number}", **wrong}


CASE = json.dumps([{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}])
RECORDS: dict[str, list[dict[str, Any]]] = {
    "aime2025": [{"id": n, "problem": f"Find {n}.", "answer": str(n), "solution": "", "url": ""} for n in range(3)],
    "aime2026": [{"problem_idx": n, "answer": n, "problem": f"Find ${n}$."} for n in range(3)],
    "math500": [{"problem": f"Halve {n}.", "solution": "", "answer": rf"\frac{{{n}}}{{2}}"} for n in range(3)],
    "gpqa_diamond": [expert(n) for n in range(6)],
    "longbench_v2": [question(n) for n in range(6)],
    "longbench_v2_cot": [question(n) for n in range(6)],
    "livecodebench": [
        {"question_content": "Join.", "starter_code": "def f(a, b):", "function_name": "f", "test": CASE, "test_id": n}
        for n in range(3)
    ],
    "mrcr": [mrcr(30_000), mrcr(30_001), mrcr(30_000, 4), mrcr(60_000), mrcr(10_000), mrcr(39_000)],
}


def written(folder: Path, name: str, form: str = "jsonl", records: list[Any] | None = None) -> str:
    records = RECORDS[name] if records is None else records
    split = yaml.safe_load(group_options("dataset")[name].read_text())["split"]
    path = folder / f"{split}.{form}"
    if form == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, list(records[0]))
            rows.writeheader()
            rows.writerows(records)
    elif form == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(folder)


def options(folder: Path, name: str, records: list[Any] | None = None, form: str = "jsonl", **more: Any) -> Any:
    chosen = yaml.safe_load(group_options("dataset")[name].read_text())
    return {**chosen, "path": written(folder, name, form, records), **more}


def task(folder: Path, name: str, records: list[Any] | None = None, **more: Any) -> Any:
    return load(options(folder, name, records, **more))


@pytest.mark.parametrize("name", RECORDS)
def test_all_layouts_of_a_set_are_the_same_data(tmp_path: Path, name: str) -> None:
    made = []
    for form in ("jsonl", "parquet", *(() if name == "mrcr" else ("csv",))):  # MRCR's numbers are no texts
        (folder := tmp_path / form).mkdir()
        data_set = task(folder, name, form=form)
        made.append((data_set.identity(), [sample.prompt for sample in data_set.samples()]))
    assert all(one == made[0] for one in made) and all(made[0][1])
    assert made[0][0]["repeats"] == 1


def test_prompts_of_mathematics_are_lightevals(tmp_path: Path) -> None:
    first = next(iter(task(tmp_path, "aime2025").samples()))
    assert first.prompt.startswith("\nSolve the following math problem efficiently and clearly.  The last line of your")
    assert r"the final answer is: $\boxed{ANSWER}$. I hope it is correct' (without quotes)" in first.prompt
    assert first.prompt.endswith("Think step by step before answering.\n\nFind 0.\n")
    assert (first.answers, first.stop, first.max_new_tokens, first.truncation) == (("0",), (), 32768, "refuse")
    second = next(iter(task(tmp_path, "math500").samples()))
    assert '\n"ANSWER: $ANSWER" (without quotes) where $ANSWER is the final answer.' in second.prompt
    with pytest.raises(DataError, match=r"field 'answer' is '1/2'; expected an integer"):
        list(task(tmp_path, "aime2025", [{"problem": "p", "answer": "1/2"}]).samples())


def test_longbench_v2_has_the_official_template_and_scores_by_kind(tmp_path: Path) -> None:
    template = yaml.safe_load(group_options("dataset")["longbench_v2"].read_text())["template"]
    official = template.replace("{context}", "$DOC$").replace("{question}", "$Q$")
    for letter in "ABCD":
        official = official.replace(f"{{choice_{letter}}}", f"$C_{letter}$")
    assert hashlib.sha256(official.encode()).hexdigest()[:16] == "68a162252bc9ff71"
    data_set = task(tmp_path, "longbench_v2")
    first, second, *_ = data_set.samples()
    assert "<text>\nOnce.\n</text>" in first.prompt and "question: Why 0?\nChoices:\n(A) a0\n(B) b0\n" in first.prompt
    assert first.prompt[slice(*first.context_span)] == "Once." and first.query == "Why 0?"
    assert (first.truncation, first.rules.limit, first.max_new_tokens) == ("longbench", 120_000, 128)
    assert data_set.score(second, "The correct answer is (B)") == dict.fromkeys(
        ("score", "compensated", "hard", "medium"), 1.0
    )
    for key, value, wanted in (("length", "tiny", "short or medium or long"), ("answer", "b", "a letter A to D")):
        with pytest.raises(DataError, match=f"field '{key}' is '{value}'; expected {wanted}"):
            list(task(tmp_path, "longbench_v2", [{**question(0), key: value}]).samples())


def official(template: str) -> str:
    for name, mark in {"context": "$DOC$", "question": "$Q$", "reasoning": "$COT$"}.items():
        template = template.replace(f"{{{name}}}", mark)
    for letter in "ABCD":
        template = template.replace(f"{{choice_{letter}}}", f"$C_{letter}$")
    return template


def test_longbench_v2_with_reasoning_has_the_official_templates(tmp_path: Path) -> None:
    preset = yaml.safe_load(group_options("dataset")["longbench_v2_cot"].read_text())
    digests = {"template": "6cc33d92fd8f6116", "answer_template": "85ec59df4ac0e27a"}
    for key, digest in digests.items():
        assert hashlib.sha256(official(preset[key]).encode()).hexdigest()[:16] == digest
    data_set = task(tmp_path, "longbench_v2_cot")
    first = next(iter(data_set.samples()))
    assert first.max_new_tokens == 1024 and first.prompt.endswith("Let’s think step by step:")
    second = answer_request(first, {"prediction": " It is B.\n\n"})
    assert second.prompt.startswith(
        "Please read the following text and answer the questions below.\n\nThe text is too long and omitted here.\n\n"
        "What is the correct answer to this question: Why 0?\nChoices:\n(A) a0\n"
    )
    assert "(D) d0\n\nLet’s think step by step: It is B.\n\nBased on the above, what is the single" in second.prompt
    assert (second.max_new_tokens, second.truncation, second.context_span) == (128, "longbench", None)
    assert "Once." in first.prompt and "Once." not in second.prompt
    plain = task(tmp_path, "longbench_v2").identity()
    assert "answer_template" not in plain and data_set.identity()["answer_tokens"] == 128
    for wrong in ("{question}", "{reasoning} {reasoning}"):
        with pytest.raises(ConfigError, match=r"must contain \{reasoning\} exactly once\.\n  hint: write \{reas"):
            task(tmp_path, "longbench_v2_cot", answer_template=wrong)


def test_both_requests_of_a_question_are_one_row(tmp_path: Path) -> None:
    made = run(tmp_path, "longbench_v2_cot", limit=3, answer_tokens=7, prompt_limit="fill")
    made["runtime"]["batch_size"] = 2
    metrics = answer_run(made)
    rows = store_of(metrics).samples().rows
    assert metrics["status"] == "ok" and list(rows) == [f"longbench_v2_cot/{n}" for n in range(3)]
    first = next(iter(task(tmp_path, "longbench_v2_cot").samples()))
    for name, row in rows.items():
        assert len(row["tokens"]) == 12 and row["reasoning"]["tokens"] == 5, name
        assert row["scores"]["cut"] == row["scores"]["reasoning_cut"] == float(row["finish"] == "length") == 1.0
        assert byte_tokenizer().decode(row["tokens"][:5], skip_special_tokens=True) == row["reasoning"]["text"]
        assert byte_tokenizer().decode(row["tokens"][5:], skip_special_tokens=True) == row["prediction"]
    row = rows["longbench_v2_cot/0"]
    assert row["prompt_tokens"] == len(encode_prompt(first, byte_tokenizer()).ids)
    variants = metrics["scores"]["longbench_v2_cot"]["variants"]
    assert {"cut", "reasoning_cut", "compensated", "easy", "short"} <= set(variants)
    alone = run(tmp_path, "longbench_v2_cot", limit=3, answer_tokens=7, prompt_limit="fill")
    alone["runtime"]["results_dir"] = str(tmp_path / "alone")
    other = store_of(answer_run(alone)).samples().rows
    assert {name: row["tokens"] for name, row in other.items()} == {name: row["tokens"] for name, row in rows.items()}
    data_set = load(alone["dataset"])
    stored = {name: {**row, "scorer_version": 0, "scores": {}} for name, row in rows.items()}
    fresh = rescored(data_set, list(data_set.samples()), stored)
    assert [one["scores"] for one in fresh] == [row["scores"] for row in rows.values()]


def test_a_server_gets_both_requests_and_none_twice(tmp_path: Path) -> None:
    made = of_endpoint(tmp_path / "runs", concurrency=2)
    made["dataset"] = options(tmp_path, "longbench_v2_cot", limit=3, max_new_tokens=8, answer_tokens=9)
    made["dataset"]["prompt_limit"] = "fill"
    log = tmp_path / "requests"
    with serving(log=str(log), tokens=6) as url:
        made["model"]["urls"] = [url]
        metrics = answer_run(made)
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    rows = store_of(metrics).samples().rows
    assert metrics["status"] == "ok" and len(rows) == 3 and len(requests) == 6
    assert sorted(request.get("n_predict", request.get("max_tokens")) for request in requests) == [8] * 3 + [9] * 3
    for row in rows.values():
        assert len(row["tokens"]) == 12 and row["reasoning"]["tokens"] == 6 and row["scores"]["reasoning_cut"] == 0.0
    with serving(log=str(log), tokens=6) as url:
        made["model"]["urls"] = [url]
        answer_run(made)
    assert len(log.read_text().splitlines()) == 6


def test_livecodebench_asks_for_an_assertion(tmp_path: Path) -> None:
    first = next(iter(task(tmp_path, "livecodebench").samples()))
    assert first.prompt == (
        "Problem:\nJoin.Function:\n```\ndef f(a, b):\n```\nPlease complete the following test case:\n\n"
        "```\nassert f([1, 2], 3) == # TODO\n```\n"
    )
    assert first.answers == ("[1, 2, 3]",) and first.rules.system.startswith("You are a helpful programming assistant")
    broken = {**RECORDS["livecodebench"][0], "test": "[]"}
    with pytest.raises(DataError, match="field 'test' is not a JSON list"):
        list(task(tmp_path, "livecodebench", [broken]).samples())


def test_mrcr_has_bins_and_turns(tmp_path: Path) -> None:
    data_set = task(tmp_path, "mrcr")
    samples = list(data_set.samples())
    assert [sample.score_key for sample in samples] == ["mrcr_2needle@8192", "mrcr_2needle@16384"] + [
        "mrcr_2needle@8192"
    ] * 2
    assert samples[0].rules.history == tuple(MESSAGES[:2]) and samples[0].prompt == MESSAGES[2][1]
    assert data_set.score(samples[0], "x9Round and quiet.") == {"score": 1.0}
    assert [sample.length for sample in task(tmp_path, "mrcr", limit=2).samples()] == [8192, 16384]
    other = [{**mrcr(30_000), "prompt": json.dumps([{"role": "user", "content": "Hm."}])}]
    assert task(tmp_path, "mrcr", other).identity() != task(tmp_path, "mrcr", [mrcr(30_000)]).identity()
    with pytest.raises(DataError, match="none of 1 records has 8 needles"):
        list(task(tmp_path, "mrcr", [mrcr(30_000)], needles=8).samples())
    with pytest.raises(ConfigError, match=r"dataset\.truncation"):
        task(tmp_path, "mrcr", truncation="middle")
    assert data_set.notes()["lengths"] == "estimated, 4.9 characters a token"
    for key, value in {"needles": 3, "lengths": [9000]}.items():
        with pytest.raises(ConfigError, match=f"dataset.{key}"):
            task(tmp_path, "mrcr", **{key: value})


def test_bins_of_mrcr_by_the_authors_tokens_are_those_of_messages_and_answer(tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "kvbench/models/tiny/tokenizer.json"
    count = Tokenizer.from_file(str(file)).encode
    record = mrcr(1)
    texts = [turn["content"] for turn in json.loads(record["prompt"])] + [record["answer"]]
    unit = sum(len(count(text, add_special_tokens=False).ids) for text in texts)
    filler = [{"role": "user", "content": " a" * (size - unit)} for size in (8192, 8193, 4095)]
    for turn, size in zip(filler, (8192, 8193, 4095), strict=True):
        assert len(count(turn["content"], add_special_tokens=False).ids) == size - unit
    long = [{**record, "prompt": json.dumps([turn, *json.loads(record["prompt"])])} for turn in filler]
    data_set = task(tmp_path, "mrcr", [*long, mrcr(30_000)], o200k=str(file))
    assert [sample.length for sample in data_set.samples()] == [8192, 16384]  # the others are too short
    assert data_set.notes()["lengths"] == "tokens of tokenizer.json"
    assert data_set.identity()["o200k"] and "o200k" not in task(tmp_path, "mrcr", [mrcr(30_000)]).identity()
    limited = Tokenizer.from_file(str(file))
    limited.enable_truncation(16)
    limited.enable_padding()
    limited.save(str(tmp_path / "limited.json"))  # some files say how to cut and pad, which is no matter of counting
    data_set = task(tmp_path, "mrcr", [*long, mrcr(30_000)], o200k=str(tmp_path / "limited.json"))
    assert [sample.length for sample in data_set.samples()] == [8192, 16384]
    with pytest.raises(ConfigError, match=r"dataset\.o200k.*is not a tokenizer.*\n.*dataset\.o200k=null, which"):
        list(task(tmp_path, "mrcr", [record], o200k=str(tmp_path)).samples())


def conversation(folder: Path, tokens: int, number: int) -> dict[str, Any]:
    """A conversation whose prompt has this many tokens of the byte tokenizer, in the first bin."""
    turns = [{"role": "user", "content": ""}, *json.loads(mrcr(1)["prompt"])]
    record = {**mrcr(30_000), "answer": f"x9{number:08}", "prompt": json.dumps(turns)}
    (sample,) = task(folder, "mrcr", [record]).samples()
    turns[0]["content"] = "y" * (tokens - len(encode_prompt(sample, byte_tokenizer()).ids))
    return {**record, "prompt": json.dumps(turns)}


def near_the_limit(tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run of three conversations, whose answers have 100 tokens, just enough tokens and one too few; its records."""
    room, answer = 8192, 11  # ten characters, and the token that ends it
    lengths = (room - 100, room - answer, room + 1 - answer)
    records = [conversation(tmp_path, tokens, number) for number, tokens in enumerate(lengths)]
    made = run(tmp_path, "mrcr", lengths=[8192], records=records, repeats=2)
    made["dataset"]["max_new_tokens"] = 20
    made["model"]["max_length"] = made["model"]["architecture"]["max_position_embeddings"] = room
    return made, records


def test_conversations_that_do_not_fit_with_their_answers_are_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, records = near_the_limit(tmp_path)
    room, answer = 8192, 11
    metrics = answer_run(made)
    said = "2 of 6 samples do not fit into the model with their answers (model.max_length=8192), and are left out"
    assert f"{said}: mrcr/2~0, mrcr/2~1" in capsys.readouterr().err
    rows = store_of(metrics).samples().rows
    assert metrics["status"] == "ok" and metrics["samples"]["requested"] == 4
    assert metrics["samples"]["too_long"] == {"mrcr_2needle@8192": ["mrcr/2~0", "mrcr/2~1"]}
    assert {row["prompt_tokens"]: row["truncated"] for row in rows.values()} == {room - 100: 0, room - answer: 0}
    limits = {row["prompt_tokens"]: len(row["tokens"]) for row in rows.values() if row["finish"] == "length"}
    assert limits == {room - 100: 20, room - answer: answer}
    again = answer_run(made)  # nothing is left to do, and the same are left out
    assert again["samples"] == metrics["samples"] and store_of(again).samples().rows == rows
    assert "2 samples that the model does not hold" in "\n".join(notes([on_disk(metrics)]))
    capsys.readouterr()
    assert report.main(["--results", str(tmp_path / "runs"), "--show", metrics["run_id"]]) == 0
    shown = capsys.readouterr().out
    assert "  left out    mrcr_2needle@8192: 2 do not fit with their answers: mrcr/2~0, mrcr/2~1\n" in shown
    assert "  AUC         mrcr_2needle: needs the bins 8192 and 16384\n" in shown
    entry = metrics["scores"]["mrcr_2needle@8192"]
    assert (entry["n"], entry["answers"]) == (2, 4)
    alone = run(tmp_path, "mrcr", lengths=[8192], records=[records[2]])
    alone["model"] = made["model"]
    with pytest.raises(DataError, match="none of 1 samples fits"):
        answer_run(alone)
    alone["model"] = {**made["model"], "prompt_limit": 8000}
    with pytest.raises(DataError, match="none of 1 samples fits"):
        answer_run(alone)
    assert "(model.max_length=8192, model.prompt_limit=8000)" in capsys.readouterr().err


@pytest.mark.slow  # two processes that import torch
def test_workers_leave_out_the_same_conversations_and_cut_answers_at_the_same_token(tmp_path: Path) -> None:
    made, _ = near_the_limit(tmp_path)
    alone = answer_run(made)
    made["runtime"] |= {"workers": 2, "results_dir": str(tmp_path / "workers")}
    both = answer_run(made)
    assert both["status"] == "ok" and both["samples"] == alone["samples"]
    rows = [store_of(metrics).samples().rows for metrics in (alone, both)]
    assert {name: row["tokens"] for name, row in rows[0].items()} == {
        name: row["tokens"] for name, row in rows[1].items()
    }


def test_a_conversation_is_the_mean_of_its_repeats_and_errors_are_by_conversation(tmp_path: Path) -> None:
    samples = list(task(tmp_path, "mrcr", [mrcr(30_000), mrcr(30_001)], repeats=3).samples())
    values = {"mrcr/0": (1.0, 0.5, 0.0), "mrcr/1": (0.2, 0.2, 0.2)}
    rows = []
    for one in samples:
        value = values[one.problem][int(one.id[-1])]
        about = {"id": one.id, "problem": one.problem, "task": one.task, "length": one.length, "scorer_version": 1}
        rows.append({**about, "scores": {"score": value}})
    entry = scores(rows)["mrcr_2needle@8192"]
    assert (entry["n"], entry["answers"], entry["score"]) == (2, 6, pytest.approx(0.35))
    assert entry["stderr"] == pytest.approx(statistics.stdev([0.5, 0.2]) / 2**0.5)


def test_turns_go_through_the_template_or_become_paragraphs() -> None:
    class Chat:
        chat_template = "yes"

        def apply_chat_template(self, turns: Any, **options: Any) -> str:
            return "".join(f"<{turn['role']}>{turn['content']}" for turn in turns) + "<assistant>"

    history = MESSAGES[:2]
    before, after, special = wrapper("template", Chat(), "S", history)
    assert before == f"<system>S<user>{MESSAGES[0][1]}<assistant>{MESSAGES[1][1]}<user>"
    assert (after, special) == ("<assistant>", False)
    assert wrapper("none", None, None, history)[0] == f"User: {MESSAGES[0][1]}\n\nAssistant: {MESSAGES[1][1]}\n\nUser: "
    with pytest.raises(Exception, match="has a place for one turn"):
        wrapper("Q: {prompt}", None, None, history)


def test_gpqa_has_the_orders_of_simple_evals_and_no_text_in_the_open(tmp_path: Path) -> None:
    data_set = task(tmp_path, "gpqa_diamond", form="csv", repeats=2)
    samples = list(data_set.samples())
    draw = random.Random(0)
    for number, sample in enumerate(samples):
        record, order = expert(number % 6), draw.sample(range(4), 4)
        texts = [list(record.values())[1 + place] for place in order]
        lines = [f"{letter}) {text}" for letter, text in zip("ABCD", texts, strict=True)]
        assert sample.prompt.endswith(f"before answering.\n\n{record['Question']}\n\n" + "\n".join(lines))
        assert sample.private and texts["ABCD".index(sample.answers[0])] == record["Correct Answer"]
        assert data_set.score(sample, f"Answer: {sample.answers[0]}") == {"score": 1.0}
    assert [sample.problem for sample in samples] == 2 * [f"gpqa_diamond/{number}" for number in range(6)]
    row = head(samples[0], 1, "eos", prediction=f"It asks: {samples[0].prompt}")
    shown = json.dumps([row, shown_excerpts(samples[0]), data_set.identity(), data_set.notes()])
    assert "Quagmirosaurus" not in shown and "withheld" in shown
    assert unsealed(row["prediction"]) == f"It asks: {samples[0].prompt}"
    with pytest.raises(DataError) as error:
        list(task(tmp_path, "gpqa_diamond", [{**expert(0), "Correct Answer": " "}], form="csv").samples())
    assert "Quagmirosaurus" not in str(error.value) and "no text in the field 'Correct Answer'" in str(error.value)


@pytest.mark.parametrize("text", ["", "é\ud83d", "sealed:", "a" * 10_000])
def test_seals_are_undone(text: str) -> None:
    assert unsealed(sealed(text)) == text and (not text or text not in sealed(text).removeprefix("sealed:"))
    assert unsealed(text) == text


@pytest.mark.parametrize(("name", "field"), [("livecodebench", "test"), ("mrcr", "prompt"), ("mrcr", "answer")])
@pytest.mark.parametrize(
    "value",
    [
        *("[" * 5000, "{}", "null", "[1]", '[{"role": "user", "content": null}]', "", None, 5, []),
        *('[{"role": "user", "content": "\\ud800"}]', '[{"input": "\\ud800", "output": "1"}]'),  # half a character
        '[{"role": 5, "content": "a"}, {"role": "user", "content": "b"}]',
    ],
)
def test_odd_fields_are_named_with_their_record(tmp_path: Path, name: str, field: str, value: Any) -> None:
    record = {**RECORDS[name][0], field: value}
    if (field, bool(value) and isinstance(value, str)) == ("answer", True):
        return  # any text is an answer
    with pytest.raises(DataError, match=rf"{field}'"):
        list(task(tmp_path, name, [record]).samples())


def test_a_template_that_begins_the_thinking_is_noted_in_the_row() -> None:
    sample = Sample(id="a", task="t", prompt="Why?", answers=("7",), max_new_tokens=4)
    tokenizer = byte_tokenizer()
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    for end, begun in (("<think>\n", True), ("", False), ("<think>\n\n</think>\n\n", False)):
        tokenizer.chat_template = turns + end
        for limit in (None, 40):  # also of a prompt that was cut
            long = replace(sample, prompt="Why? " * 20) if limit else sample
            prompt = encode_prompt(long, tokenizer, chat="template", limit=limit)
            assert prompt.thinking is begun and bool(prompt.removed) is bool(limit)
    row = head(sample, 3, "eos", thinking=True, prediction="x")
    assert row["thinking"] is True and "thinking" not in head(sample, 3, "eos", prediction="x")


SAMPLER = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}


def run(folder: Path, name: str, method: str = "kivi", **more: Any) -> dict[str, Any]:
    made = config(folder / "runs", method, decoding=SAMPLER, model={"max_length": 2048})
    made["dataset"] = options(folder, name, max_new_tokens=5, **more)
    return made


def test_each_of_several_answers_is_resumed_and_none_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(tmp_path, "aime2025", repeats=3)
    rows, calls = Session.rows, []

    def interrupted(session: Any, batch: Any) -> Any:
        calls.append(batch[0].id)
        if len(calls) % 5 == 0:
            raise KeyboardInterrupt
        return rows(session, batch)

    monkeypatch.setattr(Session, "rows", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            answer_run(made)
    metrics = answer_run(made)
    stored = store_of(metrics).samples().rows
    lines = (Path(metrics["run_dir"]) / "samples.jsonl").read_bytes().splitlines()
    assert len(lines) == len(stored) == 9 and metrics["status"] == "ok"
    assert {row["problem"] for row in stored.values()} == {f"aime2025/{n}" for n in range(3)}
    assert len({tuple(row["tokens"]) for row in stored.values()}) == 9
    entry = on_disk(metrics)["scores"]["aime2025"]
    assert (entry["n"], entry["answers"], entry["variants"]["cut"]["score"]) == (3, 9, 1.0)
    assert stored["aime2025/0~2"]["sampler"] == {**SAMPLER, "system": None}
    whole = run(tmp_path, "aime2025", repeats=3)
    whole["runtime"]["results_dir"] = str(tmp_path / "other")
    monkeypatch.setattr(Session, "rows", rows)
    other = store_of(answer_run(whole)).samples().rows
    assert {name: row["tokens"] for name, row in other.items()} == {name: row["tokens"] for name, row in stored.items()}
    assert answer_run(run(tmp_path, "aime2025", repeats=2))["run_id"] != metrics["run_id"]


def test_a_private_run_leaves_no_question_on_disk(tmp_path: Path) -> None:
    metrics = answer_run(run(tmp_path, "gpqa_diamond", limit=2))
    rows = store_of(metrics).samples().rows.values()
    assert len(rows) == 2 and all(row["prediction"].startswith("sealed:") for row in rows)
    for file in (tmp_path / "runs").rglob("*"):
        assert file.is_dir() or b"Quagmirosaurus" not in file.read_bytes(), file
    answer_run(run(tmp_path, "gpqa_diamond", limit=2))  # nothing to do, and nothing scored anew


def test_several_answers_of_a_server(tmp_path: Path) -> None:
    made = of_endpoint(tmp_path / "runs")
    made["dataset"] = options(tmp_path, "gpqa_diamond", max_new_tokens=8, repeats=2, limit=2, system="Be brief.")
    made["decoding"] = SAMPLER
    log = tmp_path / "requests"
    with serving(log=str(log), tokens=6) as url:
        made["model"]["urls"] = [url]
        metrics = answer_run(made)
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    assert {request["top_k"] for request in requests} == {20}
    assert len({request["seed"] for request in requests}) == len(requests) == 4
    rows = store_of(metrics).samples().rows
    assert rows["gpqa_diamond/1~1"]["problem"] == "gpqa_diamond/1"
    for row in rows.values():
        assert row["prediction"].startswith("sealed:") and row["sampler"] == {**SAMPLER, "system": None}  # no template
        assert (row["scores"]["cut"], row["scores"]["looping"]) == (0.0, 0.0)
    entry = metrics["scores"]["gpqa_diamond"]
    assert (entry["n"], entry["answers"]) == (2, 4)


@pytest.mark.parametrize(("name", "text"), [("gpqa_diamond", "wrong"), ("aime2025", "answering")])
def test_words_of_a_server_are_shown_unless_the_data_are_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    made = of_endpoint(tmp_path / "runs", concurrency=1)
    made["dataset"] = options(tmp_path, name, max_new_tokens=8, limit=1)
    with serving(faults="echo", rate=1.0) as url:
        made["model"]["urls"] = [url]
        answer_run(made)
    files = b"".join(file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file())
    shown = capsys.readouterr().err.encode(), files
    assert all(b"refuses the request with status 400" in part for part in shown)
    assert [text.encode() in part for part in shown] == 2 * [name != "gpqa_diamond"]


def test_mrcr_runs_with_its_turns_as_the_prompt(tmp_path: Path) -> None:
    data_set = task(tmp_path, "mrcr")
    made = run(tmp_path, "mrcr", lengths=[8192])
    made["model"]["max_length"] = 8192
    made["model"]["architecture"]["max_position_embeddings"] = 8192
    metrics = answer_run(made)
    assert metrics["status"] == "ok" and list(metrics["scores"]) == ["mrcr_2needle@8192"]
    sample = next(iter(data_set.samples()))
    ids = encode_prompt(sample, byte_tokenizer()).ids
    row = store_of(metrics).samples().rows[sample.id]
    assert row["prompt_tokens"] == len(ids) > sum(len(text) for _, text in MESSAGES)


@pytest.mark.parametrize(
    ("name", "more", "key"),
    [
        ("aime2025", {"repeats": 2}, "dataset.repeats"),
        ("aime2025", {"max_new_tokens": 4096}, "dataset.max_new_tokens"),
        ("aime2025", {"shots": 1}, "dataset.shots"),
        ("longbench_v2", {}, "dataset.prompt_limit"),
        ("longbench_v2_cot", {"prompt_limit": "fill", "answer_tokens": 2048}, "dataset.answer_tokens"),
        ("mrcr", {"max_new_tokens": 5}, "dataset.lengths"),
    ],
)
def test_what_a_model_cannot_take_is_refused(tmp_path: Path, name: str, more: dict[str, Any], key: str) -> None:
    made = config(tmp_path, model={"max_length": 2048})
    made["dataset"] = options(tmp_path, name, **{"max_new_tokens": 5, **more})
    with pytest.raises(ConfigError, match=key):
        answer_run(made)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 13 processes that import torch: minutes on a busy machine
def test_ten_kills_in_the_middle_of_long_answers_change_nothing(tmp_path: Path) -> None:
    """The bundled model draws 12 answers of up to 300 tokens; each kill comes within the answer after the next one."""
    data = written(tmp_path, "aime2025", records=RECORDS["aime2025"][:2])

    def command(results: Path) -> subprocess.Popen[bytes]:
        words = [f"dataset.path={data}", f"runtime.results_dir={results}", "model=tiny", "method=kivi", "logger=none"]
        words += ["dataset=aime2025", "dataset.repeats=6", "dataset.max_new_tokens=300", "decoding.temperature=1"]
        return subprocess.Popen([sys.executable, "-m", "kvbench", *words], stderr=subprocess.DEVNULL)

    def lines(results: Path) -> list[bytes]:
        return b"".join(file.read_bytes() for file in results.glob("*/samples.jsonl")).splitlines()

    draw = random.Random(0)
    for kill in range(10):
        begun = command(tmp_path / "killed")
        while len(lines(tmp_path / "killed")) == kill:
            assert begun.poll() is None
            time.sleep(0.01)
        time.sleep(draw.uniform(0.1, 0.6))  # an answer of 300 tokens takes more than a second
        begun.kill()
        begun.wait()
        assert len(lines(tmp_path / "killed")) == kill + 1
    assert [command(tmp_path / name).wait(600) for name in ("killed", "whole")] == [0, 0]
    files = [next((tmp_path / name).glob("*/samples.jsonl")) for name in ("killed", "whole")]
    killed, whole = ([outputs(row) for row in read_samples(file).rows.values()] for file in files)
    assert killed == whole and len(whole) == len(lines(tmp_path / "killed")) == 12
    assert sum(row["finish"] == "length" and len(row["tokens"]) == 300 for row in whole) >= 8
