"""The gate in front of a GPU, with devices that are made up: who enters, who waits, and who is forgotten.

The memory that a run is expected to take, from its configuration.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.config.run_config import checked_config
from kvbench.errors import ConfigError
from kvbench.methods import bytes as bytes_module
from kvbench.runner import gate
from kvbench.runner.gate import CONTEXT, check_fits, longest, peak_bytes
from kvbench.util.processor import began
from tests.run_support import ARCHITECTURE, config

SIZE = 1000


class Queue:
    """Runs in threads that enter the gate of one device; each leaves when the test releases it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inside, self.said = folder, [], []
        self._leave: dict[str, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, needed: int) -> None:
        leave, joined = threading.Event(), threading.Event()
        self._leave[name] = leave

        def run() -> None:
            with gate.entered("fake", SIZE, needed, self._say, self.folder, 0.002):
                self.inside.append(name)
                joined.set()
                assert leave.wait(20)
            self.inside.remove(name)

        thread = threading.Thread(target=run, daemon=True)
        before = len(entries(self.folder))
        thread.start()
        self._threads.append(thread)
        until(lambda: len(entries(self.folder)) > before)

    def end(self, name: str) -> None:
        self._leave[name].set()
        until(lambda: name not in self.inside)

    def close(self) -> None:
        for leave in self._leave.values():
            leave.set()
        for thread in self._threads:
            thread.join(20)

    def _say(self, line: str) -> None:
        self.said.append(line)


def entries(folder: Path) -> list[dict]:
    try:
        return json.loads((folder / "fake.json").read_text())
    except (FileNotFoundError, ValueError):
        return []


def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("did not happen")


def test_runs_share_a_device_while_they_fit_and_enter_in_order(tmp_path: Path) -> None:
    with ExitStack() as stack:
        queue = Queue(tmp_path)
        stack.callback(queue.close)
        queue.start("a", 500)
        until(lambda: queue.inside == ["a"])
        queue.start("b", 400)
        until(lambda: queue.inside == ["a", "b"])
        queue.start("large", 900)
        queue.start("small", 10)  # would fit, but does not overtake
        until(lambda: len(queue.said) == 2)
        assert queue.inside == ["a", "b"]
        assert "waiting for 900 B of 0.977 KiB on fake, which other runs use" in queue.said
        queue.end("a")
        queue.end("b")
        until(lambda: queue.inside == ["large", "small"])
        queue.end("large")
        queue.start("whole", 5000)  # more than there is: alone
        until(lambda: len(queue.said) == 3)
        queue.end("small")
        until(lambda: queue.inside == ["whole"])
        queue.start("last", 1)
        until(lambda: len(queue.said) == 4)
        queue.end("whole")
        until(lambda: queue.inside == ["last"])
    assert entries(tmp_path) == []


def test_a_process_that_ended_leaves_its_room(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from kvbench.runner import gate\n"
        f"with gate.entered('fake', {SIZE}, 900, ledgers=Path(sys.argv[1])): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert [entry["in"] for entry in entries(tmp_path)] == [True]
    (reused,) = entries(tmp_path)
    messages: list[str] = []
    with gate.entered("fake", SIZE, 900, messages.append, tmp_path, 0.002):
        assert [entry["pid"] for entry in entries(tmp_path)] != [reused["pid"]]
    assert messages == []


def test_an_error_inside_gives_the_room_back_and_a_damaged_ledger_is_empty(tmp_path: Path) -> None:
    (tmp_path / "fake.json").write_text("{")
    with pytest.raises(ValueError, match="inside"), gate.entered("fake", SIZE, 900, ledgers=tmp_path):
        raise ValueError("inside")
    assert entries(tmp_path) == []


@pytest.mark.parametrize(("text", "number"), [(None, 1), ("", 1), ("1", 1), ("3", 3)])
def test_workers_per_gpu(text: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gate.PER_GPU, raising=False)
    if text is not None:
        monkeypatch.setenv(gate.PER_GPU, text)
    assert gate.per_gpu() == number


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_workers_per_gpu_that_are_no_number_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gate.PER_GPU, text)
    with pytest.raises(ConfigError, match="must be a whole number, 1 or greater"):
        gate.per_gpu()


def test_ledgers_are_made_where_there_is_no_folder_for_others_to_read(tmp_path: Path) -> None:
    place = tmp_path / "new" / "ledgers"
    for _ in range(2):
        with gate.entered("fake", SIZE, 900, ledgers=place):
            assert len(entries(place)) == 1
    assert place.stat().st_mode & 0o777 == 0o700


def listed(place: Path, *waiting: tuple[str, int, bool]) -> gate._Ledger:
    """A ledger with entries of this process: their marks, their bytes, and whether they are in."""
    place.mkdir(exist_ok=True)
    mine = {"pid": os.getpid(), "began": began(os.getpid())}
    content = [{"mark": mark, "bytes": size, "in": inside, **mine} for mark, size, inside in waiting]
    (place / "fake.json").write_text(json.dumps(content))
    return gate._Ledger(place, "fake")


@pytest.mark.parametrize(
    ("inside", "needed", "enters"),
    [([], 5000, True), ([500], 420, True), ([500], 421, False), ([300, 200], 420, True), ([300, 200], 421, False)],
)
def test_92_percent_of_a_device_are_promised(tmp_path: Path, inside: list[int], needed: int, enters: bool) -> None:
    ledger = listed(tmp_path, *((f"in {size}", size, True) for size in inside), ("mine", needed, False))
    assert ledger.enter("mine", SIZE) is enters
    assert [entry["in"] for entry in entries(tmp_path)] == [True] * len(inside) + [enters]


def test_only_the_first_that_waits_enters(tmp_path: Path) -> None:
    ledger = listed(tmp_path, ("in", 10, True), ("first", 10, False), ("second", 10, False))
    assert not ledger.enter("second", SIZE) and not ledger.enter("in", SIZE) and not ledger.enter("unknown", SIZE)
    assert ledger.enter("first", SIZE) and ledger.enter("second", SIZE)
    ledger.leave("first")
    assert [entry["mark"] for entry in entries(tmp_path)] == ["in", "second"]


def test_an_entry_says_who_waits_for_how_much(tmp_path: Path) -> None:
    ledger = gate._Ledger(tmp_path, "cuda:0 / a b")
    marks = [ledger.join(7), ledger.join(8)]  # type: ignore[list-item]
    content = json.loads((tmp_path / "cuda-0---a-b.json").read_text())
    mine = {"pid": os.getpid(), "began": began(os.getpid()), "in": False}
    assert content == [{"mark": mark, "bytes": size, **mine} for mark, size in zip(marks, (7, 8), strict=True)]
    assert len(set(marks)) == 2


def test_a_process_with_the_number_of_one_that_ended_is_another(tmp_path: Path) -> None:
    ledger = listed(tmp_path, ("old", 900, True))
    (entry,) = entries(tmp_path)
    (tmp_path / "fake.json").write_text(json.dumps([{**entry, "began": -1.0}]))
    assert ledger.enter(ledger.join(900), SIZE)
    assert [entry["bytes"] for entry in entries(tmp_path)] == [900] and len(entries(tmp_path)) == 1


def test_ledgers_of_a_user_are_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert gate.ledger_folder() == tmp_path / "kvbench-gate-1234"
    with gate.entered("fake", SIZE, 900):
        assert len(entries(gate.ledger_folder())) == 1
    monkeypatch.delattr(os, "getuid")
    assert gate.ledger_folder() == tmp_path / "kvbench-gate-0"


PARAMETERS = 2 * 259 * 64 + 2 * (64 * 32 * (2 * 2 + 2 * 1) + 3 * 64 * 64 + 2 * 64) + 64


def expected(folder: Path, name: str = "fp16", **groups: Any) -> int:
    bytes_ = peak_bytes(checked_config(config(folder, name, **groups)))
    assert bytes_ is not None
    return bytes_


def test_weights_cache_and_activations_are_added(tmp_path: Path) -> None:
    cache = 2 * 2 * 512 * 32 * 4  # both sides, two layers, 508 + 4 tokens, fp32
    alive = 384 * (508) * 4
    one = expected(tmp_path, decoding={"max_new_tokens": 4})
    hidden, inner, heads = 64, 64, (3 * 2 + 4 * 1) * 32
    alive = 508 * max(3 * inner + 4 * hidden, 2 * hidden + heads) * 4
    assert one == PARAMETERS * 4 + cache + alive + CONTEXT


def test_weights_above_the_limit_are_refused(tmp_path: Path) -> None:
    def of(limit: float, weights: str = "random", **groups: Any) -> None:
        wide = {"architecture": {**ARCHITECTURE, "intermediate_size": 400_000}, "weights": weights, **groups}
        check_fits(checked_config(config(tmp_path, "fp16", model=wide, runtime={"memory_limit_gb": limit})))

    size = (2 * 3 * 64 * 400_000 + PARAMETERS - 2 * 3 * 64 * 64) * 4 / 2**30  # 0.57 GiB in float32
    of(size + 1e-6)
    with pytest.raises(ConfigError, match=r"limit_gb=0\.57: the weights of .* alone take 0\.6 GiB.*(\n.*)*random_int4"):
        of(0.57)
    of(size / 2 + 1e-6, dtype="auto")  # 16 bits
    with pytest.raises(ConfigError):
        of(size / 2 - 1e-3, dtype="auto")
    of(0.12, "random_int4")  # a little more than an eighth of float32: scales and the table of tokens
    with pytest.raises(ConfigError, match="limit_gb=1, or choose a smaller model"):
        of(size / 8, "random_int4")


def test_more_takes_more(tmp_path: Path) -> None:
    one = expected(tmp_path)
    assert expected(tmp_path, runtime={"batch_size": 4}) > one
    assert expected(tmp_path, "kivi") < one
    assert expected(tmp_path, model={"max_length": 1024}) > one
    assert expected(tmp_path, model={"dtype": "bfloat16"}) < one
    assert expected(tmp_path, runtime={"prefill_chunk": 16}) < one
    assert expected(tmp_path, model={"prompt_limit": 64}) < one


def test_the_longest_prompt_is_that_of_the_data_or_of_the_model(tmp_path: Path) -> None:
    def of(data: dict[str, Any], **groups: Any) -> tuple[int, int, int]:
        checked = checked_config(config(tmp_path, "fp16", **groups))
        return longest(type(checked)(**{**vars(checked), "dataset": data}))

    assert of({}) == (512 - 128, 128, 1)
    assert of({"lengths": [64, 256], "max_new_tokens": 8}) == (256, 8, 1)
    assert of({"prompts": [4096], "batches": [1, 8], "new_tokens": 16}) == (4096, 16, 8), "random weights take more"
    assert of({"lengths": [64]}, decoding={"max_new_tokens": 3}, runtime={"batch_size": 5}) == (64, 3, 5)


def test_a_model_that_the_roofline_does_not_know_has_no_forecast(tmp_path: Path, monkeypatch: Any) -> None:
    checked = checked_config(config(tmp_path, "fp16"))
    monkeypatch.setattr(type(checked.model), "dimensions", lambda self: {**ARCHITECTURE, "num_experts": 8})
    assert peak_bytes(checked) is None
    monkeypatch.setattr(type(checked.model), "dimensions", lambda self: {})
    assert peak_bytes(checked) is None


@pytest.mark.parametrize("weights", ["random", "random_int4"])
def test_weights_of_4_bits_take_less(tmp_path: Path, weights: str) -> None:
    groups = {"model": {"weights": weights, "dtype": "bfloat16"}}
    assert (expected(tmp_path, **groups) < expected(tmp_path, model={"dtype": "bfloat16"})) == (weights != "random")


def described(folder: Path, data: dict[str, Any] | None = None, **groups: Any) -> Any:
    checked = checked_config(config(folder, groups.pop("name", "fp16"), **groups))
    return checked if data is None else type(checked)(**{**vars(checked), "dataset": data})


def test_a_method_without_a_formula_counts_as_full_precision(tmp_path: Path, monkeypatch: Any) -> None:
    full, packed = expected(tmp_path), expected(tmp_path, "kivi")

    def none(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(bytes_module, "kv_bytes", none)
    assert expected(tmp_path, "kivi") == expected(tmp_path) == full > packed


def test_the_bytes_of_a_cache_are_those_of_its_method(tmp_path: Path, monkeypatch: Any) -> None:
    asked: dict[str, Any] = {}

    def predicted(method: Any, tokens: int, **named: Any) -> Any:
        asked.update(named, tokens=tokens)
        return SimpleNamespace(total=1000.9)

    monkeypatch.setattr(bytes_module, "kv_bytes", predicted)
    runs = [expected(tmp_path, runtime={"batch_size": batch, "prefill_chunk": 16}) for batch in (1, 2)]
    sizes = {"layers": 2, "query_heads": 2, "heads": 1, "channels": 32, "windows": asked["windows"]}
    assert asked == {"tokens": 512, "prompt": 384, "width": 4, **sizes}
    forward = [shape_of(tmp_path, batch) for batch in (1, 2)]
    assert runs == [
        PARAMETERS * 4 + batch * 1000 + passed + CONTEXT for batch, passed in zip((1, 2), forward, strict=True)
    ]
    expected(tmp_path, model={"dtype": "bfloat16"})
    assert asked["width"] == 2
    expected(tmp_path, model={"dtype": "bfloat16"}, runtime={"arithmetic": "float32"})
    assert asked["width"] == 2, "what a cache stores does not depend on the arithmetic"


def shape_of(folder: Path, batch: int) -> int:
    """Bytes of the activations of a pass over chunks of 16 tokens, or those of the logits, if these are more."""
    hidden, inner, heads = 64, 64, (3 * 2 + 4 * 1) * 32
    alive = batch * 16 * max(3 * inner + 4 * hidden, 2 * hidden + heads) * 4
    return max(alive, batch * 259 * (4 + 4))


def test_logits_count_where_they_take_more_than_a_pass(tmp_path: Path) -> None:
    wide = {"architecture": {**ARCHITECTURE, "vocab_size": 200_000}}
    small = {"model": wide, "decoding": {"max_new_tokens": 4}, "runtime": {"batch_size": 3}}
    cache = 2 * 2 * 512 * 32 * 4
    weights = PARAMETERS + 2 * (200_000 - 259) * 64
    assert expected(tmp_path, **small) == weights * 4 + 3 * cache + 3 * 200_000 * (4 + 4) + CONTEXT
    half = {**small, "model": {**wide, "dtype": "bfloat16"}}
    assert expected(tmp_path, **half) == weights * 2 + 3 * cache // 2 + 3 * 200_000 * (2 + 4) + CONTEXT


@pytest.mark.parametrize(
    ("data", "groups", "wanted"),
    [
        ({"window": 100}, {}, (100, 128, 1)),
        ({"length": 512}, {}, (384, 128, 1)),
        ({"length": 513}, {}, (513, 128, 1)),
        ({"lengths": [64], "window": 256, "length": 128}, {}, (256, 128, 1)),
        ({"lengths": (64, "all"), "max_new_tokens": "8"}, {}, (64, 128, 1)),
        ({"lengths": []}, {"model": {"prompt_limit": 50}}, (50, 128, 1)),
        ({"length": 40}, {"model": {"prompt_limit": 50}}, (40, 128, 1)),
        ({"max_new_tokens": 600}, {}, (1, 600, 1)),
        ({"max_new_tokens": 512}, {}, (1, 512, 1)),
        ({"max_new_tokens": 8, "new_tokens": 9}, {"decoding": {"max_new_tokens": 3}}, (509, 3, 1)),
        ({"batches": [2, 6, 3]}, {"runtime": {"batch_size": 9}}, (384, 128, 6)),
        ({"batches": []}, {"runtime": {"batch_size": 9}}, (384, 128, 9)),
    ],
)
def test_the_longest_prompt_answer_and_batch(
    tmp_path: Path, data: dict[str, Any], groups: dict[str, Any], wanted: tuple[int, int, int]
) -> None:
    assert longest(described(tmp_path, data, **groups)) == wanted


def test_weights_of_an_unknown_size_or_on_several_devices_are_not_refused(tmp_path: Path) -> None:
    checked = described(tmp_path)

    def of(dimensions: dict[str, Any] = ARCHITECTURE, here: bool = True, random: bool = False, **runtime: Any) -> None:
        model = SimpleNamespace(
            name="toy", dtype="float32", random=random, rounding=None, folder=lambda: tmp_path if here else None
        )
        model.dimensions = lambda: dimensions
        limited = dataclasses.replace(checked.runtime, **{"memory_limit_gb": 1e-6, **runtime})
        check_fits(SimpleNamespace(model=model, runtime=limited))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"or model\.weights=int4"):
        of()
    of(here=False)
    with pytest.raises(ConfigError, match=r"or model\.weights=random_int4"):
        of(here=False, random=True)
    packed = {**ARCHITECTURE, "quantization_config": {"bits": 4}}
    of(packed)
    with pytest.raises(ConfigError):
        of(packed, random=True)
    of({})
    of({}, random=True)
    for runtime in ({"memory_limit_gb": None}, {"device_map": "auto"}, {"tensor_parallel": 2}):
        of(**runtime)


def test_the_limit_that_is_proposed_leaves_a_fifth_for_the_rest(tmp_path: Path) -> None:
    wide = {**ARCHITECTURE, "intermediate_size": 800_000}  # 1.15 GiB in float32
    checked = described(tmp_path, model={"architecture": wide}, runtime={"memory_limit_gb": 1.0})
    size = (PARAMETERS + 2 * 3 * 64 * (800_000 - 64)) * 4 / 2**30
    assert 1.14 < size < 1.15
    with pytest.raises(ConfigError, match=r"memory_limit_gb=2, or model.weights=random_int4"):
        check_fits(checked)
