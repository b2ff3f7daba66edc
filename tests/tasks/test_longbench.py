"""LongBench's prompts and rules against a slow statement of the official code, on real records where they are there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.errors import ConfigError, DataError
from kvbench.models.spec import ModelConfig
from kvbench.results.store import RunStore
from kvbench.runner.batching import batches
from kvbench.runner.prompting import encode_prompt, end_ids, own_limit
from kvbench.runner.run import answer_run
from kvbench.tasks.load import load
from kvbench.tasks.longbench import EXTENDED, LongBench, longbench_templates, task_groups
from tests.data_support import data_dir, golden
from tests.marks import fast
from tests.run_support import config

RECORD = {
    "input": "Who wrote it?",
    "context": "Some text {with} braces. " * 40,
    "answers": ["Ann", "Ann Lee"],
    "length": 4100,
    "all_classes": None,
    "_id": "x",
}


#: what some tasks are scored by: classes, a number, a paragraph's number
OWN = {
    "trec": {"all_classes": ["Bob", "Ann"]},
    "lsht": {"all_classes": ["Bob", "Ann"]},
    "passage_count": {"answers": ["7"]},
    "passage_retrieval_en": {"answers": ["Paragraph 7"]},
    "passage_retrieval_zh": {"answers": ["段落7"]},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*longbench_templates(), *EXTENDED):
        records = [{**RECORD, **OWN.get(name.removesuffix("_e"), {}), "length": n} for n in (10, 4000, 9000)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from kvbench import models

    return AutoTokenizer.from_pretrained(str(Path(models.__file__).parent / "tiny"))


def test_templates_and_numbers_are_the_official_ones() -> None:
    config = golden("longbench_config.json")
    expected = golden("longbench_prompt_sha256.json")
    computed = {k: hashlib.sha256(v["prompt"].encode()).hexdigest() for k, v in longbench_templates().items()}
    assert computed == expected
    assert {k: v["max_new_tokens"] for k, v in longbench_templates().items()} == config["dataset2maxlen"]
    assert [name.removesuffix("_e") for name in EXTENDED] == config["datasets_e"]
    assert len(task_groups()["all"]) == 21
    assert len(task_groups()["en"]) == 16
    from kvbench.tasks.longbench import NO_CHAT

    assert list(NO_CHAT) == config["no_chat_template"]


def test_samples_carry_span_query_and_rules(folder: Path) -> None:
    task = LongBench(path=str(folder))
    samples = list(task.samples())
    assert len(samples) == 63
    assert len({s.id for s in samples}) == 63
    for sample in samples:
        assert sample.prompt == longbench_templates()[sample.task]["prompt"].format(**RECORD)
        assert sample.prompt[slice(*sample.context_span)] == RECORD["context"]
        without = sample.task in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        assert sample.query == ("" if without else RECORD["input"])
        assert (sample.end_text == "\n") is (sample.task == "samsum")
        assert sample.query_source == ("last_chunk" if sample.task in ("lcc", "repobench-p") else None)
    assert len(list(batches(samples, 64))) >= 10


def test_records_without_the_classes_that_score_them_are_refused(folder: Path) -> None:
    task = LongBench(path=str(folder), tasks="lsht")
    sample = next(task.samples())
    assert task.score(sample, "Ann")["score"] == 1.0
    with pytest.raises(DataError, match=r"lsht/0: lsht is scored by class, but 'all_classes' is empty"):
        task.score(replace(sample, meta={**sample.meta, "all_classes": None}), "anything")


def test_longbench_e_is_scored_by_length(folder: Path) -> None:
    task = LongBench(path=str(folder), tasks="e")
    keys = [s.score_key for s in task.samples()]
    assert keys[:3] == ["qasper_e@0-4k", "qasper_e@4-8k", "qasper_e@8k+"]
    assert len(set(keys)) == 39
    sample = next(iter(task.samples()))
    assert task.score(sample, "ann.")["score"] == 1.0


def test_identity_is_the_content_not_the_place(folder: Path, tmp_path: Path) -> None:
    task = LongBench(path=str(folder), tasks="qasper")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "qasper.json").write_text(json.dumps([{**RECORD, "length": n} for n in (10, 4000, 9000)]))
    same = LongBench(path=str(moved), tasks="qasper", limit=1)
    assert same.identity() == task.identity()
    assert replace(task, max_new_tokens=3).identity() != task.identity()


def test_a_run_adds_samples_and_scores_anew_without_generating(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(limit: int):
        settings = config(tmp_path / "runs", "kivi")
        settings["dataset"] = {
            "_target_": "kvbench.tasks.longbench.LongBench",
            "path": str(folder),
            "tasks": ["qasper", "samsum"],
            "limit": limit,
            "max_new_tokens": 4,
        }
        return answer_run(settings)

    first = go(1)
    assert first["samples"]["done"] == 2
    rows = RunStore(tmp_path / "runs", first["run_id"]).samples().rows
    more = go(3)
    assert more["run_id"] == first["run_id"]
    assert more["samples"]["done"] == 6
    after = RunStore(tmp_path / "runs", first["run_id"]).samples().rows
    assert all(after[name] == row for name, row in rows.items())
    assert more["data"]["identity"]["sha256"].keys() == {"qasper", "samsum"}
    assert more["data"]["notes"]["code_similarity"] == "difflib"
    assert "rouge_1_0_1" in more["scores"]["samsum"]["variants"]
    monkeypatch.setattr(LongBench, "scorer_version", 2)
    monkeypatch.setattr(LongBench, "score", lambda self, sample, prediction: {"score": 0.5})
    monkeypatch.setattr("kvbench.runner.ranks.open_session", lambda *args: pytest.fail("generates"))
    again = go(3)
    assert again["scores"]["qasper"]["score"] == 0.5
    assert again["scores"]["qasper"]["scorer_version"] == 2


def test_presets_and_refusals(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'qasper'"):
        load({"_target_": "kvbench.tasks.longbench.LongBench", "tasks": ["qaspr"]})
    with pytest.raises(DataError, match=r"dataset\.path=.*does not exist"):
        LongBench(path=str(folder / "no"), tasks="qasper").identity()
    (folder / "trec.jsonl").write_text(json.dumps({"input": "x"}))
    with pytest.raises(DataError, match="no field 'context'"):
        LongBench(path=str(folder), tasks="trec").identity()


def test_limits_by_data_set_before_those_of_the_model(folder: Path) -> None:
    model = ModelConfig(name="llama3-8b-instruct", hub_id="a/b", max_length=8192, prompt_limit=7000, architecture=None)

    def limit(**settings):
        return own_limit(next(iter(LongBench(path=str(folder), tasks="qasper", **settings).samples())), model)

    assert limit() == 7000
    assert limit(prompt_limit=100) == 100
    assert limit(prompt_limit="fill") is None
    assert limit(prompt_limit=31500, prompt_limits={"llama3-8b-instruct": 7500}) == 7500


def official(record, name, tokenizer, limit, chat):
    """pred.py restated: the token ids that go into the model."""
    prompt = golden_template(name).format(**record)
    ids = tokenizer(prompt, truncation=False)["input_ids"]
    if len(ids) > limit:
        half = int(limit / 2)
        prompt = tokenizer.decode(ids[:half], skip_special_tokens=True) + tokenizer.decode(
            ids[-half:], skip_special_tokens=True
        )
    if chat and name not in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"):
        prompt = f"[INST]{prompt}[/INST]"
    return tokenizer(prompt, truncation=False)["input_ids"]


def golden_template(name: str) -> str:
    text = longbench_templates()[name]["prompt"]
    assert hashlib.sha256(text.encode()).hexdigest() == golden("longbench_prompt_sha256.json")[name]
    return text


@pytest.mark.parametrize("limit", fast([3500, 31500, 901], [901]))
def test_real_prompts_equal_the_official_rule(limit: int, tokenizer) -> None:
    task = LongBench(path=str(data_dir("longbench")), limit=2 if limit == 3500 else 1)
    cut = 0
    for name in task.names:
        for sample, record in zip(replace(task, tasks=(name,)).samples(), task.records[name], strict=False):
            for chat in ("none", "[INST]{prompt}[/INST]"):
                prompt = encode_prompt(sample, tokenizer, chat=chat, limit=limit)
                assert list(prompt.ids) == official(record, name, tokenizer, limit, chat != "none"), sample.id
                cut += prompt.removed > 0
                start, end = prompt.context_span
                context = tokenizer.decode(prompt.ids[start:end])
                bare = context.strip().replace("�", "")
                assert bare[:20] in record["context"] and bare[-20:] in record["context"], sample.id
                if record["input"] and "{input}" in golden_template(name):
                    assert end < len(prompt.ids)
    assert cut > 0


def test_samsum_ends_at_a_line_feed(folder: Path, tokenizer) -> None:
    sample = next(iter(LongBench(path=str(folder), tasks="samsum").samples()))
    assert end_ids(sample, tokenizer) == tokenizer.encode("\n", add_special_tokens=False)[-1:]
    assert sample.say_something is True


def test_samsums_rule_is_that_of_stock_generate(tokenizer) -> None:
    """pred.py: eos_token_id=[eos, line feed] and min_length=context+1, so that the first token ends nothing."""
    import torch

    import kvbench
    from kvbench.decoding import generate
    from kvbench.models.load import hf_config, random_model
    from kvbench.util.schema import build
    from tests.run_support import ARCHITECTURE

    numbers = {"name": "toy", "weights": "random", "max_length": 512, "architecture": ARCHITECTURE}
    model = random_model(hf_config(build(ModelConfig, numbers, "model")), torch.float32, torch.device("cpu"), 0)
    method = kvbench.load_method("fp16")
    draw = torch.Generator().manual_seed(1)
    early = 0
    for _ in range(6):
        ids = torch.randint(3, 259, (1, 20), generator=draw)
        free = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0, 20:
        ].tolist()
        # the first token that plain decoding would give ends answers here, and one of the later ones
        ends = [free[0], free[3]]
        stock = model.generate(
            ids, max_new_tokens=8, do_sample=False, eos_token_id=ends, min_length=21, pad_token_id=0
        )[0, 20:].tolist()
        mine = generate(model, method.new_cache(model), ids, max_new_tokens=8, eos_token_ids=ends, say_something=True)
        method.detach(model)
        assert mine.tokens[0] == (stock[:-1] if stock[-1] in ends else stock)
        early += mine.finish[0] == "eos"
    assert early > 0


def test_one_file_is_not_several_tasks(folder: Path) -> None:
    with pytest.raises(DataError, match="the file of a single task"):
        LongBench(path=str(folder / "qasper.jsonl")).identity()
    assert LongBench(path=str(folder / "qasper.jsonl"), tasks="qasper").identity()


def test_room_is_kept_where_the_rule_leaves_it_open(folder: Path, tokenizer) -> None:
    sample = next(iter(LongBench(path=str(folder), tasks="qasper").samples()))
    prompt = encode_prompt(sample, tokenizer, chat="[INST]" * 30 + "{prompt}[/INST]", limit=200, room=210)
    assert len(prompt.ids) <= 210
    assert prompt.removed > 0


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        (
            "qasper",
            {"answers": "Paris"},
            r"field 'answers' is a string \('Paris'\); expected a list of at least one string",
        ),
        ("qasper", {"answers": []}, "field 'answers' is a list"),
        ("qasper", {"answers": [1]}, "field 'answers'"),
        ("qasper", {"answers": None}, "field 'answers' is null"),
        ("qasper", {"context": ["text"]}, "field 'context' is a list"),
        ("qasper", {"context": " "}, "field 'context' is an empty string"),
        ("qasper", {"context": "\ud800"}, "lone surrogate"),
        ("qasper", {"input": None}, "field 'input' is null"),
        ("qasper", {"input": {"a": 1}}, "field 'input' is an object"),
        ("qasper_e", {"length": "4100"}, "field 'length' is a string"),
        ("qasper_e", {"length": True}, "field 'length' is a boolean"),
        ("qasper_e", {"length": None}, "field 'length' is null"),
        ("trec", {"all_classes": "AnnBob"}, "field 'all_classes' is a string"),
        ("trec", {"all_classes": None}, "trec is scored by class, but 'all_classes' is empty"),
        ("lsht", {"all_classes": []}, "lsht is scored by class, but 'all_classes' is empty"),
        ("trec_e", {"all_classes": ["ann", "Bob"]}, r"none of the answers \['Ann', 'Ann Lee'\]"),
        ("passage_count", {"answers": ["seven"]}, r"scored by number, but none of the answers \['seven'\] is a number"),
        ("passage_retrieval_en", {"answers": ["7"]}, "the answer '7' does not name a paragraph"),
        ("passage_retrieval_zh_", {"answers": ["Paragraph 7"]}, "the answer 'Paragraph 7' does not name a paragraph"),
    ],
)
def test_records_that_cannot_be_scored_are_refused_when_read(folder: Path, task: str, change: dict, said: str) -> None:
    task = task.rstrip("_")
    lines = (folder / f"{task}.jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    (folder / f"{task}.jsonl").write_text("\n\n".join(lines))
    with pytest.raises(DataError, match=rf"{task}.jsonl line 3: .*{said}"):
        LongBench(path=str(folder), tasks=(task,)).identity()


def test_one_form_is_not_taken_for_the_other(folder: Path) -> None:
    (folder / "qasper_e.jsonl").unlink()
    with pytest.raises(DataError, match=r"hint: qasper.jsonl is not the right file: .* set dataset=longbench to"):
        LongBench(path=str(folder), tasks="e").identity()
    (folder / "trec.jsonl").unlink()
    with pytest.raises(DataError, match=r"hint: trec_e.jsonl is not the right file: .* set dataset=longbench_e to"):
        LongBench(path=str(folder), tasks="trec").identity()
    for name in ("narrativeqa_e", "musique_e", "qasper_e_e", "_e"):
        with pytest.raises(ConfigError, match="is not a task of LongBench"):
            load({"_target_": "kvbench.tasks.longbench.LongBench", "tasks": [name]})


def test_tasks_without_a_chat_wrapper_have_none_in_longbench_e_either(folder: Path) -> None:
    plain = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}  # pred.py, build_chat's exceptions
    samples = LongBench(path=str(folder), tasks="e", limit=1).samples()
    wrapped = {sample.task.partition("_e")[0]: sample.rules.chat for sample in samples}
    assert {task for task, chat in wrapped.items() if not chat} == plain - {"lsht"}
    samples = LongBench(path=str(folder), limit=1).samples()
    assert {sample.task for sample in samples if not sample.rules.chat} == plain
