"""Rows of the leaderboard: from a run to a file, what a check refuses, reruns, the page, and the committed rows."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.bench.prediction import CacheShape
from kvbench.cli.report_runs import Code
from kvbench.config.run_config import checked_config
from kvbench.errors import KvbenchError
from kvbench.methods.load import load_method
from kvbench.results import board_file
from kvbench.results.board import BoardRow, RowError, board_figures, differences, disagreement, from_exact, row_status
from kvbench.results.board_file import MOST_BYTES, read_row, row_text
from kvbench.results.identity import run_id
from kvbench.results.store import RunStore
from kvbench.submit import build, check
from kvbench.submit.check import cache_of, cache_shape, cached_tokens, check_bytes, half_bytes, unpredicted
from kvbench.submit.command import main
from kvbench.submit.listing import listing_markdown, markdown_escape, read_listing
from tests.submit.made_rows import config_of, finished_run

ROOT = Path(__file__).resolve().parents[2]
LEADERBOARD = ROOT / "leaderboard"
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True, scope="module")
def digests() -> Iterator[None]:
    """Digests of the sources, which take longer than all else, are computed once."""
    known = Code()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.submit.command.Code", lambda: known)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    finished_run(folder, "kivi")
    finished_run(folder, "fp16", (1.0, 1.0, 1.0))
    return folder


@pytest.fixture(scope="module")
def content(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of the row of kivi."""
    folder = tmp_path_factory.mktemp("rows")
    assert main([names(runs)["kivi int2"], "--results", str(runs), "--to", str(folder), "--who", "A Reader"]) == 0
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text(encoding="utf-8"))


def names(runs: Path) -> dict[str, str]:
    read = (json.loads((path / "metrics.json").read_text(encoding="utf-8")) for path in runs.iterdir())
    return {metrics["label"]: metrics["run_id"] for metrics in read}


def write(folder: Path, content: dict[str, Any], change: Change = lambda row: None, *, rehash: bool = True) -> Path:
    """Write a changed row; `rehash`: with the id and the digest that belong to it."""
    row = json.loads(json.dumps(content))
    change(row)
    if rehash and isinstance(row.get("identity"), dict) and {"setting", "method"} <= row["identity"].keys():
        row["run"] = run_id(row["identity"])
    text = row_text(row) if rehash else json.dumps(row)
    path = folder / f"{row['run']}-{json.loads(text)['digest'][:8]}.json"
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path) -> BoardRow:
    row = read_row(path)
    check_bytes(row)
    return row


def test_a_row_has_settings_samples_bytes_and_no_private_text(content: dict[str, Any], runs: Path) -> None:
    assert content["name"] == "kivi int2" and content["mean"]["n"] == 3
    assert content["scores"]["key_value@2048"]["value"] == pytest.approx(2.5 / 3)
    assert content["bytes"]["bits"] == pytest.approx(16 * content["bytes"]["total"] / content["bytes"]["fp16"])
    method = content["identity"]["method"]
    assert method["method"]["residual"] == 128 and method["quantizer"]["key"]["bits"] == 2
    text = json.dumps(content)
    assert "answer 0" not in text and str(runs) not in text and "key_value@2048/0" not in text


def test_a_row_comes_back_as_it_was(content: dict[str, Any], tmp_path: Path) -> None:
    row = read(write(tmp_path, content))
    assert (row.who, row.model, row.data, row.quantizer) == ("A Reader", "tiny", "mini", "int2")
    assert main(["--check", str(next(tmp_path.glob("*.json")))]) == 0


def put(*path: Any, value: Any) -> Change:
    """A change of the value at a path of keys."""

    def change(row: dict[str, Any]) -> None:
        *outer, last = path
        node: Any = row
        for key in outer:
            node = node[key]
        node[last] = value

    return change


def more(*path: Any, by: float) -> Change:
    def change(row: dict[str, Any]) -> None:
        node: Any = row
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] += by

    return change


METHOD, SAMPLE = ("identity", "method", "method"), ("samples", "key_value@2048", 0)


def other_values(row: dict[str, Any]) -> None:
    """Better scores, with figures that follow from them: nothing but a rerun can show it."""
    for sample in row["samples"]["key_value@2048"]:
        sample[1] = 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("bytes", "total", value=10), r"bytes.total: 10; its samples and settings give 1,109,333"),
        (more(*SAMPLE, 4, by=-8), r"stored|takes [\d,]+"),
        (
            put(*METHOD, "residual", value=64),
            r"bytes for 940 tokens, 900 of them in the prompt; kivi int2 on tiny takes",
        ),
        (put("cache", "heads", value=1), r"tiny has BoardCache"),
        (more("bytes", "bits", by=0.5), r"bytes.bits"),
        (put("mean", "value", value=1.0), r"mean: 1 with n=3; its samples give 0.833"),
        (other_values, r"scores.key_value@2048: 0.833333 with n=3; its samples give 1 with"),
        (put("name", value="fp16"), r"name=fp16: its settings are kivi int2"),
        (put("model", value="llama2-7b"), r"model=llama2-7b: its settings name tiny"),
        (put(*METHOD, "_target_", value="os.system"), r"os.system is no method of conf/method"),
        (put(*METHOD, "_target_", value="kvbench.cli.main.main"), r"is no method of conf/method"),
        (put(*METHOD, "surprise", value=1), r"surprise"),
        (put(*METHOD, "key_axis", value="../../etc/passwd"), r"must not tell a path"),
        (put("quantizer", value="../evil.py"), r"must not tell a path"),
        (put("quantizer", value="evil.py"), r"names a file"),
        (put("quantizer", value="int4"), r"does not match the formats"),
        (put("layers", value="0:fp16"), r"layers=0:fp16: not the formats by layer of its settings"),
        (put("who", value=""), r"who: expected a name of 1 to 80"),
        (put("who", value="a" * 81), r"who: expected a name of 1 to 80"),
        (put("who", value="a\u202eb"), r"must be printable"),
        (put("link", value="javascript:alert(1)"), r"link: an address"),
        (put("link", value="https://a.example/)[x](https://b.example"), r"link: an address"),
        (put("date", value="yesterday"), r"date=yesterday"),
        (put("outputs", value="0"), r"outputs: expected 64"),
        (put("measure", value="luck"), r"measure"),
        (put("kind", value="recipe"), r"expected 1 and row"),
        (put("who", value="\u200b"), r"who: expected a name of 1 to 80 visible characters"),
        (put("name", value="kivi int2, the best of all"), r"its settings are kivi int2$"),
        (put("date", value="9" * 3000), r"date=9{100,500} \.\.\.$"),
        (put("dtype", value="float32"), r"cache.width=2, dtype=float32: expected"),
        (put("dtype", value="the best of all"), r"cache.width=2, dtype=the best of all: expected"),
        (put("device", value="the best of all " * 6), r"device=the best.*: expected a name of 1 to 80 characters"),
        (put("identity", "setting", "data", "identity", value={}), r"data=: expected a name"),
        (put("who", value=" A"), r"who: expected a name of 1 to 80 visible characters"),
        (put("surprise", value=1), r"surprise is not a key"),
        (put("identity", value={}), r"identity: expected setting"),
        (put("identity", "setting", value=[]), r"identity: expected setting"),
        (put("samples", value={}), r"samples: 0; expected"),
        (put("samples", "a|b<c>", value=[]), r"samples"),
        (put(*SAMPLE, 1, value=True), r"expected \[id, value, prompt, tokens, bytes\]"),
        (put(*SAMPLE, 1, value=1.5), r"expected \[id, value, prompt, tokens, bytes\]"),
        (put(*SAMPLE, 2, value=10**14), r"expected \[id"),
        (put(*SAMPLE, 3, value=1 << 30), r"expected 1 to 16,777,216"),
        (put(*SAMPLE, 0, value="<img src=x>"), r"expected \[id"),
        (put(*SAMPLE, value=["0" * 12]), r"expected \[id"),
        (put("mean", "n", value=10**16), r"larger than"),
        (put("cache", "layers", value=-1), r"makes no sense"),
        (put("cache", "channels", value=1 << 20), r"makes no sense"),
        (put("cache", "windows", value=[]), r"a number of tokens or null for each layer"),
        (put(*METHOD, "residual", value=-5), r"its settings make no sense: method.residual=-5"),
        (put(*METHOD, "rotation", value="x"), r"its settings make no sense"),
        (put("identity", "setting", "model", "weights", value="random"), r"random weights are no result"),
        (put("bytes", "scales", value=0), r"bytes.scales: 0; its samples and settings give 242,346"),
        (put("bytes", "index", value=-1), r"bytes: parts of .* -1, 0 are not those of 1,109,333"),
        (put("versions", value={"a": {"b": 1}}), r"versions.a is not a text"),
        (put("device", value="/home/somebody"), r"device=/home/somebody: a row must not tell a path"),
        (put("versions", value={"torch": "C:\\\\torch"}), r"versions.torch=.*: a row must not tell a path"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(
    content: dict[str, Any], tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises((RowError, KvbenchError), match=message):
        read(write(tmp_path, content, change))


def test_measured_bytes_have_parts_that_add_up(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check.MEASURED, "Kivi", "the test says so")
    for change in (put("bytes", "scales", value=0), put("bytes", "index", value=-7)):
        with pytest.raises(RowError, match=r"bytes: parts of .* are not those of 1,109,333"):
            read(write(tmp_path, content, change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply|is not JSON"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ("[1]", "content is not an object"),
        ('{"a":' * 14 + "1" + "}" * 14, "nested more than 12 levels"),
        ("\udc80", "cannot be read"),
    ],
)
def test_a_file_that_is_no_row_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RowError, match=f"x.json: .*({message})"):
        read_row(path)


def test_large_files_other_names_and_edits_are_refused(
    tmp_path: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, content)
    other = path.rename(tmp_path / "other.json")
    with pytest.raises(RowError, match="rename the file"):
        read_row(other)
    with pytest.raises(RowError, match="it was edited or damaged"):
        read_row(write(tmp_path, content, put("who", value="B"), rehash=False))
    other.write_bytes(b" " * (MOST_BYTES + 1))
    with pytest.raises(RowError, match="at most 1,048,576"):
        read_row(other)
    assert main(["--check", "--to", str(tmp_path)]) == 1
    assert "refused: other.json" in capsys.readouterr().err


def one_of(content: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a row of kivi int2 with its first sample alone."""
    tokens, total = content["samples"]["key_value@2048"][0][3:]
    parts = vars(CacheShape(8, 6, 2, 64, (None,) * 8, 0).bytes(load_method("kivi", quantizer="int2"), tokens, tokens))
    return {"total": total, **parts, "fp16": 4096 * tokens, "bits": total / tokens / 256, "per_token": total / tokens}


def test_reruns_are_compared_sample_by_sample(content: dict[str, Any], tmp_path: Path) -> None:
    first = read(write(tmp_path, content))

    def rerun(**changes: Any) -> BoardRow:
        return read(write(tmp_path, {**content, "again": first.digest, "who": "B", **changes}))

    def scored(*scores: float) -> dict[str, Any]:
        pairs = zip(content["samples"]["key_value@2048"], scores, strict=False)
        samples = [[*old[:1], score, *old[2:]] for old, score in pairs]
        figures, mean = board_figures("score", {"key_value@2048": samples})
        return {
            "samples": {"key_value@2048": samples},
            "scores": {key: vars(one) for key, one in figures.items()},
            "mean": vars(mean),
        }

    assert disagreement(rerun(), first) is None
    assert (
        disagreement(rerun(who="A Reader"), first)
        == "A Reader cannot reproduce a row of their own; another --who is needed"
    )
    shifted = rerun(**scored(0.9, 0.4, 0.9))
    (part,) = differences(shifted, first)
    assert part.paired and part.value == pytest.approx(-0.1) and part.stderr == pytest.approx(0, abs=1e-12)
    assert "key_value@2048 differs from" in str(disagreement(shifted, first))
    assert disagreement(rerun(**scored(1.0, 0.0, 1.0)), first) is None, "one of three answers: within its error"
    own, poor = rerun(who="A Reader"), rerun(who="C", **scored(0.9, 0.4, 0.9))
    assert row_status(first, [first, own, poor]) == "self-reported", "their own rerun, and one that does not agree"
    assert row_status(first, [first, own, poor, rerun()]) == "reproduced by B" and row_status(own, []) == "a rerun"
    few = read(write(tmp_path, {**content, "again": first.digest, "who": "B", **scored(1.0), "bytes": one_of(content)}))
    assert "has 1 of the 3 samples of" in str(disagreement(few, first))
    (part,) = differences(read(write(tmp_path, {**content, **scored(1.0, 0.0, 1.0)})), first)
    assert part.value == pytest.approx(-1 / 6) and part.stderr == pytest.approx(1 / 6)


def test_a_difference_is_from_the_fp16_row_of_the_same_name(runs: Path) -> None:
    made = {name: build.row_content(RunStore(runs, run), "A", None, "2026-11-24") for name, run in names(runs).items()}

    def row(name: str, who: str, score: float) -> BoardRow:
        content = {**made[name], "who": who}
        (key, samples), *_ = content["samples"].items()
        samples = {key: [[digest, score, *sizes] for digest, _, *sizes in samples]}
        scores, mean = board_figures("score", samples)
        figures = {"scores": {key: vars(one) for key, one in scores.items()}, "mean": vars(mean)}
        return build.finished_row({**content, "samples": samples, **figures})[1]

    packed, low, own = row("kivi int2", "A", 0.5), row("fp16", "B", 0.25), row("fp16", "A", 1.0)
    pairs = [from_exact(packed, rows) for rows in ([low, own, packed], [own, low, packed], [low, packed])]
    assert [pair and pair.value for pair in pairs] == [-0.5, -0.5, 0.25]
    assert from_exact(packed, [packed]) is None and from_exact(own, [low, own]) is None


def test_the_command_submits_compares_and_writes_the_page(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, options = names(runs), ["--results", str(runs), "--to", str(tmp_path)]
    evil = "<b>|[x](y)`"
    assert main([*ids.values(), *options, "--who", evil, "--link", "https://a.example/b"]) == 0
    assert main(["--check", *options[2:]]) == 1 and "does not show these rows" in capsys.readouterr().err
    assert main(["--write", *options[2:]]) == 0 and main(["--check", *options[2:]]) == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"[{markdown_escape(evil)}](https://a.example/b) | self-reported" in page and "<b>" not in page
    assert "| -0.1667 (" in page, "the paired difference from fp16"
    (row,) = tmp_path.glob(f"{ids['kivi int2']}*.json")
    again = ["--again", ids["kivi int2"], "--row", str(row), *options]
    capsys.readouterr()
    assert main(again) == 0 and "all answers are the same\nnot written" in capsys.readouterr().out
    assert main([*again, "--who", "B"]) == 0 and main(["--write", *options[2:]]) == 0
    assert "reproduced by B" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert main(["--again", ids["fp16"], "--row", str(row), *options]) == 1
    assert "its settings are not those of" in capsys.readouterr().err
    main([ids["fp16"], *options, "--who", evil])
    assert any("has this run already" in problem for problem in read_listing(tmp_path).problems)


def test_formats_by_layer_are_part_of_a_row(tmp_path: Path) -> None:
    store = finished_run(tmp_path, "kivi", method={"layers": "0-1:fp16,5-:int4"})
    row_of = build.row_content(store, "A", None, "2026-11-24")
    text, row = build.finished_row(row_of)
    check_bytes(row)
    assert row.layers == "0-1:fp16,5-:int4" and "layers=0-1:fp16,5-:int4" in row.name
    with pytest.raises(RowError, match=r"layers=0-1:fp16,5-6:int4: not the formats"):
        read(write(tmp_path, json.loads(text), put("layers", value="0-1:fp16,5-6:int4")))
    assert unpredicted(load_method("kivi")) is None
    assert unpredicted(load_method("cocktail")) == "the bits of each chunk depend on the text"


def test_what_a_run_measures_follows_from_its_rows(tmp_path: Path) -> None:
    """A KL divergence comes before a score, and a likelihood counts where there is no score."""
    store, shape = RunStore(tmp_path, "x"), CacheShape(1, 1, 1, 64, (None,), 0)
    cache = cache_of({"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}, 2)
    assert cache_shape(cache) == shape
    held = {"used": {"total": 7}, "fp16_equivalent": 256 * 90}
    row = {"id": "a", "task": "t", "scores": {}, "prompt_tokens": 80, "kv_bytes": held, "nll": {"sum": 6.0, "n": 3}}

    def of(**changes: Any) -> tuple[str, Any]:
        measure, samples = build.board_samples(store, [{**row, **changes}], cache)
        return measure, samples["t"][0][1:]

    assert of() == ("perplexity", [2.0, 80, 90, 7])
    assert of(window={"prefill": 16}) == ("perplexity", [2.0, 16, 90, 7]), "a window is no prompt"
    assert of(scores={"score": 0.5}) == ("score", [0.5, 80, 90, 7])
    assert of(scores={"score": 0.5}, fidelity={"kld": [0.1, 0.3]}) == ("kl", [0.2, 80, 90, 7])
    for changes, message in (
        ({"nll": None}, "has no score, perplexity or KL"),
        ({"kv_bytes": None}, "1 samples have no bytes, such as a"),
        ({"fidelity": {"kld": [float("inf")]}}, "no finite kl"),
    ):
        with pytest.raises(KvbenchError, match=message):
            of(**changes)
    assert board_figures("perplexity", {"t": [["a", 1.0, 0, 1, 1], ["b", 3.0, 0, 1, 1]]})[1].value == pytest.approx(
        math.exp(2.0)
    )


def test_runs_that_cannot_be_rows(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--results", str(tmp_path), "--to", str(tmp_path / "rows"), "--who", "A"]
    store = finished_run(tmp_path, "kivi")
    metrics = json.loads((store.path / "metrics.json").read_text(encoding="utf-8"))
    store.write_metrics({**metrics, "sources": {"0" * 12: {**metrics["sources"]["0" * 12], "method": "0" * 12}}})
    assert main([store.run_id, *options]) == 1 and "its status is older" in capsys.readouterr().err
    store.write_metrics(metrics)
    config = store.config()
    assert config is not None
    store.start({**config, "method": {**config["method"], "residual": 64}})
    assert main([store.run_id, *options]) == 1 and "their id is now" in capsys.readouterr().err
    store.start({**config, "model": {**config["model"], "urls": ["http://127.0.0.1:1"]}})
    assert main([store.run_id, *options]) == 1 and "behind a server" in capsys.readouterr().err
    (store.path / "metrics.json").unlink()
    store.start(config)
    assert main([store.run_id, *options]) == 1 and "is not finished" in capsys.readouterr().err
    samples = store.samples_path.read_bytes()
    store.write_metrics(metrics)
    store.samples_path.write_bytes(samples[: samples.index(b"\n") + 1])  # as of a run that goes on
    assert main([store.run_id, *options]) == 1 and "do not cover its present samples" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert main([store.run_id, *options[:-1], ""]) == 2 and "--who=: must be the name" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


def test_folders_that_are_none_or_full_are_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, none, file = names(runs)["kivi int2"], str(tmp_path / "none"), tmp_path / "file"
    file.write_text("", encoding="utf-8")
    nowhere = ["--check", "--to", none], ["--write", "--to", str(file)], [run, "--who", "A", "--results", none]
    for arguments in nowhere:
        assert main(arguments) == 2 and "is no folder" in capsys.readouterr().err
    assert main([run, "--results", str(runs), "--who", "A", "--to", str(file)]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("kvbench.submit.command.atomic.replace_file", full)
    assert main([run, run, "--results", str(runs), "--who", "A", "--to", str(tmp_path / "to")]) == 1
    assert "No space left on device.\n  hint: check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("/home/somebody/model", "a path"),
        ("~/model", "a path"),
        ("a/../b", "a path"),
        ("build on the-machine-7", "the name of a machine or user"),
        ("You are a careful assistant. " * 3, "a text that may be a prompt"),
    ],
)
def test_paths_names_of_the_machine_and_prompts_are_refused(
    text: str, what: str, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.socket, "gethostname", lambda: "the-machine-7")
    with pytest.raises(KvbenchError, match=f"a row must not tell {what}"):
        build._check_private({"identity": {"setting": {"stop": [text]}}})
    for data in ({"system": "Be brief."}, {"over": {"system": "Be brief."}}):
        with pytest.raises(KvbenchError, match=r'may be a prompt: "Be brief."'):
            build._check_private({"identity": {"setting": {"data": {"identity": data}}}})
    layers = ",".join(f"{layer}:int8/int4" for layer in range(40))
    build._check_private({"who": text, "device": "AMD EPYC", "layers": layers, "identity": {"setting": {}}})


def test_words_of_every_row_are_no_private_names(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.getpass, "getuser", lambda: "kvbench")
    monkeypatch.setattr(build.Path, "home", lambda: Path("/"))
    build._check_private(content)


@pytest.mark.parametrize("windows", [(None, None), (None, 64), (64, 64)])
def test_tokens_follow_from_bytes_in_16_bits(windows: tuple[int | None, ...]) -> None:
    shape = CacheShape(2, 4, 2, 64, windows, state=640)
    exact = shape.bytes(load_method("fp16"), 50, 50).total
    assert half_bytes(shape, 50, 2) == exact and half_bytes(shape, 50, 4) == exact - 320
    assert cached_tokens(shape, 40, exact, 2) == 50
    with pytest.raises(KvbenchError, match="no number of tokens"):
        cached_tokens(shape, 40, exact + 1, 2)


def test_the_committed_rows_pass_the_check() -> None:
    listing = read_listing(LEADERBOARD)
    assert not listing.problems and len(listing.rows) >= 8
    assert listing_markdown(listing) == (LEADERBOARD / "README.md").read_text(encoding="utf-8")
    assert len({row.group for row in listing.rows}) >= 2 and {row.measure for row in listing.rows} == {"score", "kl"}
    assert all(row.commit and not row.commit.endswith("+") for row in listing.rows), "made from committed code"


def test_several_answers_to_a_problem_have_one_error(tmp_path: Path) -> None:
    """Answers to one problem are equal here, so that the error is that of three problems."""
    store = finished_run(tmp_path, "kivi", (1.0, 1.0, 0.0, 0.0, 0.5, 0.5))
    rows = [
        {**row, "id": f"kv/{number // 2}~{number % 2}", "problem": f"kv/{number // 2}"}
        for number, row in enumerate(store.samples().rows.values())
    ]
    cache = cache_of(checked_config(config_of("kivi")).model.dimensions(), 2)
    measure, samples = build.board_samples(store, rows, cache)
    _, mean = board_figures(measure, samples)
    assert (mean.n, mean.value, mean.stderr) == (3, 0.5, pytest.approx(0.5 / 3**0.5))
    assert len({sample[0] for group in samples.values() for sample in group}) == 6
    assert all(board_file._well_formed(measure, sample) for group in samples.values() for sample in group)
