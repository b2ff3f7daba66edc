"""Tasks of lm-evaluation-harness with the model ``kvbench``, compared with its `hf`: caches, request caches, rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import ConfigError
from kvbench.results import samples
from kvbench.tasks.mini import Mini

pytest.importorskip("lm_eval", reason="needs the package lm-eval: pip install 'kvbench[lm-eval]'")

from kvbench.lm_eval.command import main  # imports nothing of lm-eval by itself

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "kvbench" / "models" / "tiny"
GENERATED = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: {tokens}}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
CHOSEN = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three local tasks: word problems, keys with values, and a choice among values."""
    mini = Mini()
    for name, kind, tokens in (("problems", "arithmetic", 64), ("values", "key_value", 16)):
        drawn = [mini.sample(kind, 512, index) for index in range(2)]
        lines = [json.dumps({"prompt": one.prompt, "answer": one.continuation}) for one in drawn]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(lines))
        (tmp_path / f"{name}.yaml").write_text(GENERATED.format(name=name, file=file, tokens=tokens))
    lines = []
    for index in range(2):
        one = mini.sample("key_value_hex", 512, index)
        choices = [mini.sample("key_value_hex", 512, 50 + index).continuation, one.continuation]
        lines.append(json.dumps({"prompt": one.prompt, "choices": choices, "gold": 1}))
    file = tmp_path / "choice.jsonl"
    file.write_text("\n".join(lines))
    (tmp_path / "choice.yaml").write_text(CHOSEN.format(name="choice", file=file))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def evaluate(*words: str, model: str = "kvbench", out: str = "out") -> int:
    return main(["run", "--model", model, "--include_path", ".", "--output_path", out, "--log_samples", *words])


def answers(out: str) -> dict[tuple[str, int], Any]:
    """The last evaluation's responses by task and document."""
    found = {}
    for file in sorted(Path(out).rglob("samples_*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[file.name.split("_")[1], row["doc_id"]] = row["resps"]
    return found


def test_fp16_is_hf_to_the_last_sample_and_int2_is_not(place: Path) -> None:
    tasks = ["--tasks", "problems,values,choice"]
    assert evaluate("--model_args", "model=tiny,dtype=float32", *tasks, "--device", "cuda:0") == 0
    assert evaluate("--model_args", "model=tiny,dtype=float32,setting=kivi:int2", *tasks, out="int2") == 0
    assert (
        evaluate("--model_args", f"pretrained={TINY},dtype=float32", *tasks, "--device", "cpu", model="hf", out="hf")
        == 0
    )
    ours, theirs, packed = answers("out"), answers("hf"), answers("int2")
    assert len(ours) == 6 and ours.keys() == theirs.keys() == packed.keys()
    for (task, doc), responses in ours.items():
        if task != "choice":
            assert responses == theirs[task, doc]
            continue
        for one, other, third in zip(responses, theirs[task, doc], packed[task, doc], strict=True):
            assert float(one[0][0]) == pytest.approx(float(other[0][0]), abs=1e-3)
            assert one[0][1] == other[0][1]
            assert third[0][0] != one[0][0]  # hf's would be equal: it never reads the cache
    runs = {path.parent: json.loads(path.read_text()) for path in Path("results/runs").glob("*/metrics.json")}
    assert {run["label"] for run in runs.values()} == {"fp16", "kivi int2"}
    for folder, run in runs.items():
        assert run["samples"]["done"] == 6 and set(run["scores"]) == {"problems", "values", "choice"}
        rows = samples.read_samples(folder / "samples.jsonl").rows.values()
        assert all(row["kv_bytes"]["used"]["total"] > 0 for row in rows)
        assert run["data"]["notes"]["requests"] == 8
        assert run["data"]["notes"]["exact_requests"] == (8 if run["label"] == "fp16" else 0)


def test_a_request_cache_belongs_to_a_setting(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ["--tasks", "choice", "--use_cache", "answers"]
    assert evaluate("--model_args", "model=tiny,setting=fp16", *tasks) == 0
    first = answers("out")
    assert evaluate("--model_args", "model=tiny,setting=kivi:int2", *tasks) == 0
    assert answers("out") != first
    assert evaluate("--model_args", "model=tiny,setting=fp16", *tasks) == 0
    assert "no request reached the model" in capsys.readouterr().err
    assert len(list(place.glob("answers-*"))) == 2


def test_short_contexts_are_said_to_test_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "model=tiny,setting=kivi:int2:residual=512"
    assert evaluate("--model_args", arguments, "--tasks", "values", "--batch_size", "3") == 0
    assert "2 requests; in 2 (100 %) the cache held every token exactly" in capsys.readouterr().err


def test_a_key_covers_the_arguments_that_change_an_answer() -> None:
    from kvbench.lm_eval.chosen import choose, setting_key

    chosen = choose({"model": "tiny", "setting": "kivi:int2"})
    keys = [setting_key(chosen, host) for host in (None, {"add_bos_token": True}, {"enable_thinking": False})]
    assert len(set(keys)) == 3 and setting_key(choose({"model": "tiny", "setting": "kivi:int2"}), None) == keys[0]
    assert setting_key(choose({"model": "tiny", "setting": "kivi:int2", "seed": 1})) not in keys


def test_prompts_that_lose_their_beginning_are_counted(place: Path) -> None:
    """A model of 512 tokens has room for 256 of the prompt if the answer may have as many."""
    (place / "cut.yaml").write_text(GENERATED.format(name="cut", file=place / "values.jsonl", tokens=256))
    assert evaluate("--model_args", "model=tiny,max_length=512,results_dir=rows", "--tasks", "cut") == 0
    (path,) = place.glob("rows/*/metrics.json")
    assert json.loads(path.read_text())["samples"]["truncated"] == 2
    rows = samples.read_samples(path.parent / "samples.jsonl").rows.values()
    assert all(0 < row["truncated"] < 256 and row["prompt_tokens"] == 256 for row in rows)


def test_repeats_of_a_sampled_prompt_differ(place: Path) -> None:
    task = GENERATED.format(name="drawn", file=place / "values.jsonl", tokens=16)
    drawn = task.replace("max_gen_toks: 16", "max_gen_toks: 16, do_sample: true, temperature: 3.0") + "repeats: 3\n"
    (place / "drawn.yaml").write_text(drawn)
    assert evaluate("--model_args", "model=tiny", "--tasks", "drawn") == 0
    first = answers("out")
    assert len(first) == 2 and all(len(set(responses[0])) > 1 for responses in first.values())


def test_generation_arguments_without_a_counterpart_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those whose value 1 or True is not the neutral one."""
    assert evaluate("--model_args", "model=tiny", "--tasks", "values", "--gen_kwargs", "min_new_tokens=1") != 0
    error = capsys.readouterr().err
    assert "min_new_tokens=1" in error and "is not supported through the cache" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size=1"),
        ({"do_sample": True, "temperature": 0.0}, "needs a temperature above 0"),
    ],
)
def test_arguments_that_would_change_an_answer_unseen_are_refused(options: dict[str, Any], message: str) -> None:
    from kvbench.lm_eval.model import sampling

    with pytest.raises(ConfigError, match=message):
        sampling(options, [0])
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "min_p": 0, "use_cache": True, "do_sample": False}
    assert sampling({**neutral, "temperature": 0.7}, [0]).temperature == 0
    assert sampling({"do_sample": True, "temperature": 0.7}, [3]).seed == [3]


def test_a_file_of_options_may_give_model_arguments_as_text(place: Path) -> None:
    lines = ["model: kvbench", "model_args: model=tiny,setting=kivi:int2,results_dir=rows", "tasks: [values]"]
    lines += ["include_path: .", "output_path: out", "use_cache: answers"]
    (place / "options.yaml").write_text("\n".join(lines))
    assert main(["run", "--config", "options.yaml"]) == 0
    assert len(list(place.glob("answers-*"))) == 1
    (metrics,) = place.glob("rows/*/metrics.json")
    assert json.loads(metrics.read_text())["label"] == "kivi int2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("setting=kivi", "must name one model"),
        ("model=tiny,setting=kiwi", "did you mean"),
        ("model=tiny,settting=kivi", "did you mean setting"),
        ("model=tinny", "did you mean"),
        ("model=tiny,setting=kivi:int4,dtype=float31", "model.dtype"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--model_args", arguments, "--tasks", "values") != 0
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_lm_evals_own_words_still_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--no_such_option"]) == 2
    assert sys.argv[0] != "lm-eval"
    assert main([]) == 0
    assert "--model kvbench" in capsys.readouterr().out
