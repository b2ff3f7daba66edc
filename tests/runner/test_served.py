"""Runs on a model behind a server: rows, faults, kills of either side, identity, refusals before the first sample."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.endpoint import client, life
from kvbench.endpoint.client import without_key
from kvbench.endpoint.life import KEY, EndpointError, free_port
from kvbench.errors import ConfigError
from kvbench.results.samples import MEASURED, outputs, read_samples
from kvbench.results.store import RunStore
from kvbench.runner.run import answer_run
from tests.endpoint.fake_server import numbers, tokenizer
from tests.endpoint.serving import F16, SERVER, of_endpoint, process, serving
from tests.run_files import on_disk
from tests.run_support import ToyTask

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_S", 0.01)
    monkeypatch.delenv(KEY, raising=False)


def stored(metrics: dict[str, Any]) -> dict[str, Any]:
    """The rows of a run, without what varies; each sample has exactly one line."""
    path = Path(metrics["run_dir"]) / "samples.jsonl"
    rows = read_samples(path)
    assert not rows.damaged
    assert len(path.read_bytes().splitlines()) == len(rows.rows), "a sample has two rows"
    return {name: outputs(row) for name, row in rows.rows.items()}


def test_rows_have_the_servers_tokens_and_say_what_server_it_was(tmp_path: Path) -> None:
    log = tmp_path / "requests"
    with serving(log=str(log), tokens=6) as url:
        metrics = answer_run(of_endpoint(tmp_path, urls=[url], concurrency=3))
    assert (metrics["status"], metrics["label"], metrics["samples"]["done"]) == ("ok", "fp16 @url", 6)
    on_disk(metrics)
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(asked) == 6
    assert all(one["n_predict"] == 8 and one["cache_prompt"] is False and one["n_probs"] == 20 for one in asked)
    answers = {tuple(numbers(one["prompt"], 6, tokenizer().get_vocab_size())) for one in asked}
    rows = RunStore(tmp_path, metrics["run_id"]).samples().rows.values()
    assert {tuple(row["tokens"]) for row in rows} == answers
    for row in rows:
        server = row[MEASURED]["endpoint"]
        assert (row["finish"], row["prediction"]) == ("eos", tokenizer().decode(row["tokens"]))
        assert (server["engine"], server["version"], server["ids"]) == ("llamacpp", "b1-fake", "server")
        assert (server["attempts"], server["cached"], server["cache"]["proof"]) == (1, 0, "unknown")
        assert len(row[MEASURED]["step_s"]) == 5
        assert row[MEASURED]["ttft_s"] > 0
        assert [place[0][0] for place in row["top_logprobs"]] == row["tokens"]
    assert metrics["kv_bytes"]["used"]["total"] is None
    again = answer_run(of_endpoint(tmp_path, urls=["http://127.0.0.1:9"], concurrency=3))
    assert again["status"] == "ok", "a finished run asks no server"


@pytest.mark.parametrize("engine", ["llamacpp", pytest.param("vllm", marks=pytest.mark.slow), "other"])
def test_faults_change_no_row(tmp_path: Path, engine: str) -> None:
    with serving(engine=engine, word="auto") as url:
        whole = stored(answer_run(of_endpoint(tmp_path / "whole", urls=[url], limit=12)))
    faults = "429,500,503,cut,junk,hang"
    with serving(engine=engine, word="auto", faults=faults, seed=3) as url:
        metrics = answer_run(of_endpoint(tmp_path / "faults", urls=[url], limit=12, retries=40, timeout_s=0.15))
    assert metrics["status"] == "ok"
    assert stored(metrics) == whole
    attempts = [
        row[MEASURED]["endpoint"]["attempts"]
        for row in RunStore(tmp_path / "faults", metrics["run_id"]).samples().rows.values()
    ]
    assert sum(attempts) > 18


def test_text_alone_is_cut_at_stop_strings_and_tokenized_again(tmp_path: Path) -> None:
    made = of_endpoint(tmp_path, urls=[""], limit=1)
    with serving(engine="other") as url:
        made["model"]["urls"] = [url]
        (row,) = stored(answer_run(made)).values()
        made["decoding"] = {"stop": [row["prediction"][3:5]]}
        cut = answer_run(made)
    (short,) = stored(cut).values()
    assert (short["prediction"], short["finish"]) == (row["prediction"][:3], "stop")
    assert "top_logprobs" not in row


@pytest.mark.parametrize(
    ("fault", "told"),
    [("ids", "not those of the text"), ("length", "prompt tokens"), ("429", "failed 3 times: status 429")],
)
def test_a_failed_request_is_no_row_and_is_sent_by_the_next_command(tmp_path: Path, fault: str, told: str) -> None:
    with serving(faults=fault, rate=1.0) as url:
        failed = answer_run(of_endpoint(tmp_path, urls=[url], limit=2, retries=2))
    assert (failed["status"], failed["samples"]["done"]) == ("error", 0)
    assert told in failed["error"]
    with serving() as url:
        assert answer_run(of_endpoint(tmp_path, urls=[url], limit=2))["samples"]["done"] == 2


@pytest.mark.parametrize(
    ("options", "model", "told"),
    [
        ({"key": "secret-1"}, {}, "refuses the key"),
        ({}, {"served": "other"}, "allowed: fake"),
        ({"engine": "vllm", "word": "fp8"}, {}, "says that its cache has the format fp8"),
        ({"engine": "vllm", "word": "auto", "held": F16 * 2048, "cells": 4096}, {}, "takes 2048 bytes per token"),
        ({"engine": "sglang", "word": "fp8_e4m3", "held": F16 * 4096}, {"form": "fp8"}, "but fp8 takes 2048"),
    ],
)
def test_what_is_wrong_with_a_server_is_said_before_any_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, model: Any, told: str
) -> None:
    monkeypatch.setenv(KEY, "wrong-key-2")
    log = tmp_path / "requests"
    with serving(log=str(log), **options) as url, pytest.raises((EndpointError, ConfigError), match=told) as caught:
        answer_run(of_endpoint(tmp_path, urls=[url], **model))
    assert not log.exists()
    assert "hint:" in str(caught.value) or "allowed:" in str(caught.value)
    files = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "wrong-key-2" not in files + str(caught.value)


def test_a_key_reaches_the_server_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv(KEY, "secret-7")
    with serving(key="secret-7") as url:
        assert answer_run(of_endpoint(tmp_path, urls=[url], limit=2))["status"] == "ok"
    said = capsys.readouterr()
    files = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "secret-7" not in files + said.out + said.err
    assert without_key("Incorrect key: secret-7") == "Incorrect key: ***"


def test_a_key_that_fits_no_header_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(key="secret-7") as url:
        for text in ("secret-7\nmore", "sécret-7"):
            monkeypatch.setenv(KEY, text)
            with pytest.raises(EndpointError, match="set it again") as caught:
                answer_run(of_endpoint(tmp_path, urls=[url], limit=1))
            assert "cret" not in str(caught.value)
        monkeypatch.setenv(KEY, "secret-7\r\n")
        assert answer_run(of_endpoint(tmp_path, urls=[url], limit=1))["status"] == "ok"


def test_servers_of_two_engines_are_not_one_run(tmp_path: Path) -> None:
    with serving() as one, serving(engine="vllm") as other, pytest.raises(ConfigError, match="not the same engine"):
        answer_run(of_endpoint(tmp_path, urls=[one, other]))


def test_a_run_is_not_continued_by_another_engine(tmp_path: Path) -> None:
    with serving() as one, serving(engine="vllm") as other:
        done = answer_run(of_endpoint(tmp_path, urls=[one], limit=2))
        path = Path(done["run_dir"]) / "samples.jsonl"
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        with pytest.raises(ConfigError, match="has the engine vllm, but this run has rows of llamacpp"):
            answer_run(of_endpoint(tmp_path, urls=[other], limit=2))
        assert answer_run(of_endpoint(tmp_path, urls=[one], limit=2))["samples"]["done"] == 2


@pytest.mark.parametrize(
    ("url", "told"),
    [("http://127.0.0.1:9", "no server can be reached"), ("https://127.0.0.1", "does not speak TLS")],
)
def test_a_server_that_is_not_there(tmp_path: Path, url: str, told: str) -> None:
    with serving() as real:
        address = url if ":9" in url else f"{url}:{real.rpartition(':')[2]}"
        with pytest.raises(EndpointError, match=told):
            answer_run(of_endpoint(tmp_path, urls=[address]))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"urls": []}, "must name running servers"),
        ({"urls": ["http://a"], "serve": "vllm"}, "excludes model.serve"),
        ({"urls": ["http://user:pw@host"]}, "not the address of a server"),
        ({"urls": ["localhost:8000"]}, "not the address of a server"),
        ({"urls": ["http://localhost:80a"]}, "not the address of a server"),
        ({"urls": ["http://localhost:99999"]}, "not the address of a server"),
        ({"serve": "llamacpp", "served": "none.gguf"}, "is not a GGUF file"),
        ({"serve": "vllm", "args": ["--api-key=abc"]}, "would put a secret into files"),
        ({"serve": "vllm", "args": ["--hf-token", "abc"]}, "would put a secret into files"),
        ({"serve": "vllm", "binary": "vllm --api-key abc"}, "would put a secret into files"),
        ({"serve": "vllm", "binary": "vllm '"}, "No closing quotation"),
        ({"urls": ["http://a"], "form": "int8fork"}, None),
        ({"serve": "vllm", "form": "q8_0"}, "is not a cache format of vllm"),
        ({"serve": "vllm", "form": "fp8/nvfp4"}, "differs for keys and values"),
    ],
)
def test_refused_configurations(tmp_path: Path, model: dict[str, Any], told: str | None) -> None:
    expected: Any = EndpointError if told is None else ConfigError
    with pytest.raises(expected, match=told or "no server|reached"):
        answer_run(of_endpoint(tmp_path, **{"urls": [], **model}))


@pytest.mark.parametrize("url", ["http://user:sec/ret@host", "http://host/#sec/ret", "http://host?key=sec/ret"])
def test_an_address_is_refused_without_its_secret(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="give a key as the environment variable") as caught:
        answer_run(of_endpoint(tmp_path, urls=[url]))
    assert "sec/ret" not in str(caught.value)


def test_a_file_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    metrics = answer_run(started(tmp_path, tmp_path, f"mib={F16 * 4096 / 2**20}", served="~/file.gguf", limit=1))
    assert str(tmp_path / "file.gguf") in metrics["env"]["endpoint"]["command"]


def test_a_method_that_no_server_has_is_refused(tmp_path: Path) -> None:
    made = of_endpoint(tmp_path, urls=["http://127.0.0.1:9"], form="q8_0")
    made["method"]["window"] = 32
    with pytest.raises(ConfigError, match=r"method\.window=32: is not an option of a server"):
        answer_run(made)


def test_the_identity_has_the_server_but_not_its_address(tmp_path: Path) -> None:
    with serving() as one, serving() as other:
        ids = [
            answer_run(of_endpoint(tmp_path, limit=1, **model))["run_id"]
            for model in (
                {"urls": [one]},
                {"urls": [other, one], "retries": 3, "timeout_s": 9.0},
                {"urls": [one], "prefix_reuse": True},
                {"urls": [one], "concurrency": 1},
                {"urls": [one], "form": "q8_0"},
            )
        ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4
    assert ids[4].split("-")[0] == ids[0].split("-")[0] != ids[2].split("-")[0]


def test_a_format_is_paired_with_the_servers_own_fp16_and_bounded(tmp_path: Path) -> None:
    with serving() as url:
        answer_run(of_endpoint(tmp_path, urls=[url], limit=3))
    with serving(shift=1) as url:
        made = answer_run(of_endpoint(tmp_path, urls=[url], limit=3, form="q8_0"))
    score = made["scores"]["first"]
    assert score["vs_fp16"]["n"] == score["n"] == 2
    bound = score["kl_bound"]
    assert (bound["prompts"], bound["positions"], bound["top"]) == (2, 2, 2)
    assert bound["mean"] > 0.05


# -- a server that the run starts ------------------------------------------------------------------------------------


def started(results: Any, tmp_path: Path, *options: str, **more: Any) -> dict[str, Any]:
    """A run that starts the fake server in place of llama-server, through a script that drops the engine's flags."""
    script = tmp_path / "llama-server"
    if not script.exists():
        script.write_text(
            f"#!{sys.executable}\nimport os, sys\nat = sys.argv.index\n"
            "port, name = sys.argv[at('--port') + 1], sys.argv[at('--alias') + 1]\n"
            f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(SERVER)!r}, port, 'name=' + name]"
            " + [word for word in sys.argv[1:] if '=' in word])\n"
        )
        script.chmod(0o755)
        (tmp_path / "file.gguf").write_bytes(b"GGUF")
    model = {"serve": "llamacpp", "served": str(tmp_path / "file.gguf"), "binary": str(script), "args": list(options)}
    return of_endpoint(results, **{**model, "start_s": 30.0, **more})


def test_a_started_server_is_proven_kept_in_the_log_and_gone_at_the_end(tmp_path: Path) -> None:
    made = started(tmp_path, tmp_path, f"mib={F16 * 4096 / 2**20}", "step_s=0.001", limit=3)
    metrics = answer_run(made)
    assert metrics["label"] == "fp16 @llamacpp"
    server = metrics["env"]["endpoint"]
    assert server["cache"] == {"proof": "proven", "word": "f16", "bytes_per_token": F16, "expected": F16}
    log = (Path(metrics["run_dir"]) / "server.log").read_text()
    assert log.startswith("$ ")
    assert "--cache-type-k f16 --cache-type-v f16" in log
    assert "llama_kv_cache: size" in log
    used = metrics["kv_bytes"]["used"]["total"]
    assert used == int(F16 * (metrics["samples"]["prompt_tokens"]["mean"] + 7))
    port = server["command"][server["command"].index("--port") + 1]
    with pytest.raises(EndpointError, match="no server can be reached"):
        client.get(f"http://127.0.0.1:{port}", "/health")


def test_the_log_of_a_server_that_read_private_texts_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = ToyTask.samples
    monkeypatch.setattr(ToyTask, "samples", lambda task: (replace(one, private=True) for one in samples(task)))
    metrics = answer_run(started(tmp_path, tmp_path, f"mib={F16 * 4096 / 2**20}", limit=1))
    assert metrics["status"] == "ok" and not (Path(metrics["run_dir"]) / "server.log").exists()


@pytest.mark.parametrize(
    ("options", "more", "told"),
    [
        (("exits=3",), {}, "ended with status 3: error: cannot load the model"),
        (("mib=3.0",), {}, "it has another format"),
        ((), {"binary": "no-such-program"}, "there is no such program"),
        ((), {"port": 0}, "in use"),
    ],
)
def test_a_server_that_does_not_start(tmp_path: Path, options: Any, more: Any, told: str) -> None:
    with serving() as url:
        if "port" in more:
            more = {"port": int(url.rpartition(":")[2])}
        with pytest.raises((EndpointError, ConfigError), match=told):
            answer_run(started(tmp_path, tmp_path, *options, **more))


# -- kills -----------------------------------------------------------------------------------------------------------

#: a run in a process of its own: its configuration is read from standard input
RUN = (
    "import json, sys; from kvbench.runner.run import answer_run; "
    "print('RESULT', json.dumps(answer_run(json.load(sys.stdin))['status']), flush=True)"
)


def run_process(made: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(made))
    child.stdin.close()
    child.stdin = None  # communicate() flushes one that is there, also if it is closed
    return child


def row_count(folder: Path) -> int:
    return sum(len(read_samples(path).rows) for path in folder.glob("*/samples.jsonl"))


def wait_for_rows(folder: Path, more: int, child: subprocess.Popen[str] | None = None) -> None:
    while row_count(folder) < more and (child is None or child.poll() is None):
        time.sleep(0.01)


def servers_of(script: str) -> list[int]:
    """Process ids of the fake servers whose command has a word."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
        except OSError:
            continue
        if b"fake_server" in words and script.encode() in words:
            found.append(int(name))
    return found


@pytest.mark.slow  # 20 kills of a process that imports torch
@pytest.mark.parametrize("signaled", [signal.SIGKILL, signal.SIGINT])
def test_the_run_is_killed_ten_times_and_its_server_goes_with_it(tmp_path: Path, signaled: int) -> None:
    mark = f"seed={random.Random(str(tmp_path)).randrange(10**6)}"
    options = (mark, f"mib={F16 * 4096 / 2**20}", "step_s=0.03")
    whole = stored(answer_run(started(tmp_path / "whole", tmp_path, *options, limit=60)))
    made, kills, rows = started(tmp_path / "killed", tmp_path, *options, limit=60), 0, 0
    while kills < 10:
        child = run_process(made)
        wait_for_rows(tmp_path / "killed", rows + 1, child)
        assert child.poll() is None, "it ended before it was killed"
        child.send_signal(signaled)
        child.communicate()
        limit = time.monotonic() + 15
        while servers_of(mark) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not servers_of(mark), "a server has outlived its run"
        assert row_count(tmp_path / "killed") > rows, "a kill lost rows"
        rows, kills = row_count(tmp_path / "killed"), kills + 1
    metrics = answer_run(made)
    assert metrics["status"] == "ok"
    assert stored(metrics) == whole


@pytest.mark.slow
def test_the_server_is_killed_twenty_times_and_rows_are_equal(tmp_path: Path) -> None:
    port = free_port(None)
    server = process(port, step_s=0.02)
    url = f"http://127.0.0.1:{port}"
    whole = stored(answer_run(of_endpoint(tmp_path / "whole", urls=[url], limit=60)))
    made = of_endpoint(tmp_path / "killed", urls=[url], limit=60, retries=50)
    child, rng = run_process(made), random.Random(0)
    wait_for_rows(tmp_path / "killed", 1, child)
    for kill in range(20):
        time.sleep(rng.random() * 0.3)
        assert child.poll() is None, f"the run ended after {kill} kills"
        server.kill()
        server.wait()
        server = process(port, step_s=0.02)
    assert 'RESULT "ok"' in child.communicate()[0]
    server.kill()
    assert stored(answer_run(made)) == whole


@pytest.mark.slow
def test_a_server_that_dies_under_a_run_ends_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    options = (f"mib={F16 * 4096 / 2**20}", "step_s=0.02")
    whole = stored(answer_run(started(tmp_path / "whole", tmp_path, *options, limit=8, concurrency=2)))
    made = started(tmp_path / "killed", tmp_path, *options, limit=8, concurrency=2)
    enter, servers = life.Server.__enter__, []

    def entered(server: life.Server) -> life.Server:
        servers.append(enter(server))
        return servers[-1]

    def begun(_: str) -> None:
        def kill() -> None:
            wait_for_rows(tmp_path / "killed", 2)
            os.killpg(servers[0]._process.pid, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(life.Server, "__enter__", entered)
        failed = answer_run(made, begun)
    assert failed["status"] == "error"
    assert "the server ended with status" in failed["error"]
    assert 2 <= failed["samples"]["done"] < 8
    metrics = answer_run(made)
    assert (metrics["status"], stored(metrics)) == ("ok", whole)
