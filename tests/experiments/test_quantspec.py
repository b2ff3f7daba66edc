"""The experiments on the bundled model, on a prompt each, and how their tables are made."""

import json

import pytest

from experiments.prompts import Prompt, books, loaded, tasks
from experiments.quantspec import equality, table
from experiments.quantspec.acceptance import DRAFTS, answers
from experiments.quantspec.table import fold_speculation
from kvbench.config.run_config import RuntimeConfig
from kvbench.methods.quantspec import SPARSE


@pytest.mark.slow  # 12 s
def test_one_prompt_speculates_as_the_target_alone_and_passes_a_flush():
    setup = equality.EqualitySetup("cpu", 32, "int4_all")
    whole = tasks(setup.tokenizer, 512, 1)[0]
    length = equality.lengths(32, 3)[2]
    prompt = Prompt(whole.id, whole.ids[:length], None, "", stop=False)
    records = equality.compare_gammas(setup, prompt, [2, 5], 24)
    assert [record["equal"] for record in records] == [True, True]
    assert all(record["flushes"] and record["tokens"] == 23 for record in records)
    content = table.equality_figures(records, equality.TIE)
    assert "| 5 | 1 | 1 | 0 | 0 |" in "\n".join(table.equality_text(content))
    assert content["refused"] == sum(record["drafted"] - record["accepted"] for record in records)


def test_prompts_are_of_the_length_asked_for_and_say_what_is_context(tmp_path):
    setup = loaded("tiny", RuntimeConfig(device="cpu"), dtype="float32")
    (tmp_path / "a.txt").write_text("It was the best of times. " * 6000)
    (tmp_path / "b.txt").write_text("Call me Ishmael. Some years ago. " * 6000)
    computed = books(setup.tokenizer, 200, 5, str(tmp_path))
    assert [len(prompt.ids) for prompt in computed] == [200] * 5
    assert [prompt.id for prompt in computed] == ["a@200/0", "b@200/0", "a@200/1", "b@200/1", "a@200/2"]
    made = tasks(setup.tokenizer, 512, 3, ("copy_long", "repeat"))
    assert [prompt.id for prompt in made] == ["copy_long@512/0", "repeat@512/0", "copy_long@512/1"]
    assert all(prompt.span[0] < prompt.span[1] <= len(prompt.ids) for prompt in made)
    records = answers(setup, DRAFTS[0], made[1], [1, 4], 12, 0.0)
    assert [record["gamma"] for record in records] == [1, 4]
    assert records[0]["answer"] == records[1]["answer"]
    assert all(record["accepted"] <= record["drafted"] for record in records)


def test_the_sparse_drafts_are_those_of_the_paper():
    assert {draft.options.get("draft") for draft in DRAFTS} >= {
        "streamingllm",
        "snapkv",
        "kivi",
        "logquant",
        "cocktail",
    }
    assert all(options["budget"] == 0.25 for options in SPARSE.values())


def test_the_table_pairs_prompts_and_counts_them_as_clusters(tmp_path):
    path = tmp_path / "acceptance-toy.jsonl"
    lines = []
    for draft, rates in (("first", (40, 36)), ("second", (30, 34))):
        for prompt, accepted in enumerate(rates):
            record = {"data": "books", "nominal": 64, "draft": draft, "gamma": 4, "prompt": str(prompt), "seconds": 1.0}
            lines.append(
                json.dumps({**record, "rounds": 10, "drafted": 40, "accepted": accepted, "tokens": 10 + accepted})
            )
    path.write_text("\n".join(lines) + "\n")
    text, cells = fold_speculation(path, ["first", "second"], "toy")
    assert cells[1]["acceptance_rate"] == 0.8 and cells[1]["tokens_per_round"] == 4.2
    assert cells[1]["quantspec_minus_this"] == pytest.approx(0.15)
    assert cells[1]["quantspec_minus_this_stderr"] == pytest.approx(0.1)
    assert "| first | 95.0 ± 5.0<br>4.80 |" in text
    assert "| second | +15.0 ± 10.0 |" in text
