"""The door ``python -m kvbench.analysis``, on the bundled model, and its refusals."""

import json

import numpy as np
import pytest

from kvbench.analysis import command
from kvbench.analysis.command import analysis_parser, grouped, main, samples
from kvbench.analysis.outcome import Outcome, told_apart
from kvbench.errors import ConfigError, DataError

DATA = ["dataset=mini", "dataset.tasks=[key_value]", "dataset.lengths=[512]", "dataset.limit=2"]


def test_rows_arrays_and_table_beside_each_other(tmp_path, capsys):
    settings = ["fp16", "kivi:int2:residual=32", "streamingllm:budget=64"]
    options = ["--steps", "2", "--prompt-queries", "5", "--positions", "--out", str(tmp_path)]
    assert main([*DATA, *options, "--settings", *settings]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 pairs of methods differ" in shown and shown.strip() in (tmp_path / "table.md").read_text()
    outcome = Outcome.load(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == outcome.rows and len(rows) == 6 and {row["setting"] for row in rows} == set(settings)
    assert outcome.exact["prompt_mass"].shape == outcome.errors["fp16"]["l1"].shape == (2, 8, 6, outcome.bins.count)
    assert np.allclose(outcome.exact["mass"].sum(-1), 1, atol=1e-5)
    assert np.allclose(outcome.exact["prompt_mass"].sum(-1), 1, atol=1e-5)
    lengths = np.array([prompt["prompt_tokens"] for prompt in outcome.prompts])[:, None]
    # two steps see their own token too, and the last five queries of a prompt up to four tokens fewer than all
    assert np.allclose(outcome.exact["visible"].sum(-1), np.tile(lengths + 1.5, (1, 8)))
    assert np.allclose(outcome.exact["prompt_visible"].sum(-1), np.tile(lengths - 2, (1, 8)))
    for prompt in outcome.prompts:
        assert outcome.positions["mean"][prompt["id"]].shape == (2, prompt["prompt_tokens"] + 2)
    l1 = [outcome.figures(name, "l1") for name in settings]
    assert l1[0].max() < 1e-3 and (l1[0] < l1[1]).all() and (l1[1] < l1[2]).all()
    assert all(score > 2 for _, _, score in told_apart(outcome))
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["command"].endswith("streamingllm:budget=64") and about["environment"]["torch"]
    (tmp_path / "arrays.npz").unlink()
    assert Outcome.load(tmp_path, arrays=False).rows == rows
    with pytest.raises(DataError, match=r"arrays\.npz"):
        Outcome.load(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=kivi"], "--settings"),
        (["dataset=nowhere"], "dataset=nowhere"),
        (["dataset=mini", "dataset.limitt=3"], "limitt"),
        (["--steps", "0"], "--steps=0"),
        (["--prompt-queries", "-2"], "--prompt-queries=-2"),
        (["--settings", "kivi:hierarchical"], "hierarchical"),
        (["dataset=perplexity/mini_text"], "ScoreText"),
    ],
)
def test_refusals_before_anything_is_computed(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_words_are_those_of_the_main_command_line():
    groups = grouped(["model=tiny", "model.weights=random", *DATA, "runtime.device=cpu"])
    assert groups["model"]["weights"] == "random" and groups["runtime"] == {"device": "cpu"}
    assert groups["dataset"]["tasks"] == ["key_value"] and groups["dataset"]["limit"] == 2
    with pytest.raises(ConfigError, match="runtime"):
        grouped(["runtime=fast"])
    assert (
        grouped([])["runtime"] == {} and grouped([])["dataset"]["name"] == grouped(["dataset=mini"])["dataset"]["name"]
    )
    assert grouped([])["model"] == grouped(["model=tiny"])["model"]
    assert grouped(["dataset.limit=2", "dataset=mini/needle"])["dataset"]["tasks"] == ["needle"]
    for word in ("model", "method.residual=3", "runtime", "dataset.limit"):
        with pytest.raises(ConfigError, match="is not an override that the analysis accepts") as refusal:
            grouped([word])
        assert refusal.value.key == word


def test_without_options_it_is_the_papers_table():
    arguments = analysis_parser().parse_args([])
    assert (arguments.steps, arguments.prompt_queries, arguments.positions, arguments.out) == (16, 0, False, None)
    kivi = "kivi:int2:quantizer.key.group_size=64:quantizer.value.group_size=64"
    assert arguments.settings == ["logquant", kivi, "logquant:evict=true", f"{kivi}:evict=true"]


def test_warm_up_is_left_out_and_a_tokenizer_is_passed_on():
    from types import SimpleNamespace

    from kvbench.tasks.work import Generate

    work = Generate()
    task = SimpleNamespace(
        needs_tokenizer=True,
        samples=lambda: iter([SimpleNamespace(warm_up=warm, work=work, task="t") for warm in (True, False)]),
    )
    bound = []
    task.bind = bound.append
    assert [sample.warm_up for sample in samples(task, "tokenizer")] == [False] and bound == ["tokenizer"]
    task.needs_tokenizer = False
    assert len(samples(task, "tokenizer")) == 1 and len(bound) == 1


def test_an_interruption_has_the_shells_status(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_analysis", interrupted)
    assert main([]) == 130
