"""Steps of a meter, their order and their settings, over made-up generations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache.progress import Options
from kvbench.decoding.autoregressive import Generation
from kvbench.measure import meter as module
from kvbench.measure.meter import How, Meter, Watch, fresh_search
from kvbench.models.load import byte_tokenizer
from kvbench.profiling.machine import Reading, used

CPU = torch.device("cpu")


class Cache:
    """A cache of which only the figures matter."""

    reads_packed, path, notes, options = 1, "reference", None, None
    progress = SimpleNamespace(prefill=SimpleNamespace(path="eager"))

    def __init__(self, search_s: float) -> None:
        self.search_s = search_s

    def bill(self) -> Any:
        parts = {"used": {"total": 10}, "reserved": {"total": 20}, "fp16_equivalent": 40}
        return SimpleNamespace(used=SimpleNamespace(total=10), as_dict=lambda: parts)


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        own = SimpleNamespace(num_key_value_heads=2, head_dim=8, num_attention_heads=2, hidden_size=16)
        self.config = SimpleNamespace(get_text_config=lambda decoder: own)
        self.device, self.dtype = CPU, torch.float32


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that measures a point: its figures, the calls of `generate`, and the caches' lengths."""
    monkeypatch.setattr(module, "step_traffic", lambda model, figures, read_rate: {"read_rate": read_rate})
    monkeypatch.setattr(module, "nominal_bits", lambda cache: {"key": 4.0, "value": 2.0})
    monkeypatch.setattr(module, "predicted_point", lambda model, figures, *rest: rest)
    monkeypatch.setattr(
        module, "prefill_groups", lambda cache, batch, prompt, starts, rows: [slice(0, min(rows, batch))]
    )

    def point(prompt: int = 400, batch: int = 3, notes: Any = None, stepping: str = "eager", **how: Any) -> Any:
        calls: list[dict[str, Any]] = []
        lengths: list[int] = []
        searches = iter(range(1, 99))

        def new_cache(model: Any, prompts: Any, max_length: int) -> Cache:
            lengths.append(max_length)
            assert prompts.lengths == [prompts.input_ids.shape[1]] * prompts.input_ids.shape[0]
            cache = Cache(float(next(searches)))
            cache.notes = notes
            return cache

        def generate(model: Any, cache: Cache, ids: torch.Tensor, **named: Any) -> Generation:
            named["observer"].phase("prefill")
            named["observer"].phase("decode")
            named["observer"].phase("end")
            calls.append(
                {"shape": tuple(ids.shape), "options": cache.options, "census": named["observer"].peaks.kind, **named}
            )
            new = named["max_new_tokens"]
            number, captured = len(calls), named["graphs"] != "never"
            tokens = [[row + (captured and step == 1) for step in range(new)] for row in range(ids.shape[0])]
            return Generation(tokens, [], [], 10.0 * number, [float(number)] * (new - 1), [], stepping=stepping)

        monkeypatch.setattr(module, "generate", generate)
        settings = {"new_tokens": 6, "repeats": 2, "warm_up": 4, "prefill_rows": 2} | how
        method = SimpleNamespace(new_cache=new_cache, speculation=None)
        meter = Meter(Toy(), byte_tokenizer(), method, How(**settings))  # type: ignore[arg-type]
        return SimpleNamespace(meter=meter, figures=meter.point(prompt, batch), calls=calls, lengths=lengths)

    return point


def test_a_point_is_warmed_up_then_prefilled_then_counted_then_timed(measured) -> None:
    run = measured(
        untimed=1, census=True, compile=True, prefill_chunk=64, graphs="always", options=Options(kernels="triton")
    )
    assert [(call["shape"], call["max_new_tokens"]) for call in run.calls] == [
        ((1, 256), 4),
        ((3, 400), 2),
        ((3, 400), 2),
        ((3, 400), 6),
        ((3, 400), 6),
    ]
    assert [call["graphs"] for call in run.calls] == ["never", "never", "never", "always", "always"]
    assert [call["census"] for call in run.calls] == [None, None, None, "cpu_live_tensors", None]
    assert run.lengths == [256 + 6, *[400 + 6] * 4]
    for call in run.calls:
        assert (call["compile"], call["prefill_chunk"], call["prefill_rows"]) == (True, 64, 2)
        assert call["options"] == Options(kernels="triton")
    assert run.calls[-1]["sampling"].seed == [0, 1, 2] and run.calls[0]["sampling"].seed == [0]
    figures = run.figures
    # of three prefills the first is untimed; of the times 30 and 50 with searches of 3 and 5
    assert (figures["repeats"], figures["prefill_s"], figures["search_s"], figures["ttft_s"]) == (2, 40.0, 4.0, 44.0)
    assert figures["decode_s"] == 25.0 and figures["tpot_s"]["median"] == 5.0
    assert figures["tokens_per_s"] == pytest.approx(3 * 6 / (5 + 50 + 25))
    assert run.meter.tokens == [[row, row + 1, row, row, row, row] for row in range(3)]
    assert {key: figures[key] for key in ("status", "prompt", "batch", "new_tokens", "path", "prefill_path")} == {
        "status": "ok",
        "prompt": 400,
        "batch": 3,
        "new_tokens": 6,
        "path": "reference",
        "prefill_path": "eager",
    }
    assert figures["reads_packed"] is True and figures["layer_kv"] == 2 * 3 * 2 * 8 * 400 * 4
    assert figures["peak"]["kind"] == "cpu_live_tensors" and "note" not in figures and "same" not in figures


def test_a_meter_warms_up_once_and_with_no_more_than_the_prompt(measured) -> None:
    run = measured(prompt=120, batch=1, census=False)
    assert [call["shape"] for call in run.calls] == [(1, 120)] * 3
    run.meter.point(400, 2)
    assert [call["shape"] for call in run.calls[3:]] == [(2, 400)] * 2


@pytest.mark.parametrize(
    ("how", "together"),
    [({}, 2 * 400), ({"prefill_chunk": 64}, 3 * 64), ({"prefill_chunk": 999}, 2 * 400), ({"prefill_rows": 5}, 3 * 400)],
)
def test_the_prediction_is_told_the_largest_pass_and_the_bytes_before_the_first_step(measured, how, together) -> None:
    assert measured(census=False, **how).figures["predicted"] == (400, 3, 10, False, together)
    assert measured(census=False, read_rate=7.0).figures["read_rate"] == 7.0


def test_a_methods_note_is_that_of_its_first_row(measured) -> None:
    assert measured(census=False, notes=[{"chunks": 1}, {"chunks": 2}]).figures["note"] == {"chunks": 1}


@pytest.mark.parametrize(("compare", "of", "alike"), [(4, 12, 9), (9, 18, 15), (1, 3, 3)])
def test_captured_tokens_are_compared_with_eager_ones(measured, compare, of, alike) -> None:
    run = measured(census=False, compare=compare, stepping="graph, compiled")
    assert run.figures["same"] == {"of": of, "alike": alike}
    assert (run.calls[-1]["graphs"], run.calls[-1]["max_new_tokens"]) == ("never", min(compare, 6))
    assert "same" not in measured(census=False, compare=0, stepping="graph").figures
    assert "same" not in measured(census=False, compare=4, stepping="eager (no GPU)").figures


def test_stock_caches_are_measured_after_a_point_that_fits(measured, monkeypatch) -> None:
    asked: list[Any] = []

    def stock_point(name: str, model: Any, ids: torch.Tensor, how: How) -> dict[str, Any]:
        asked.append((name, tuple(ids.shape), how.new_tokens))
        if name == "static":
            raise MemoryError("tried to allocate 77 bytes")
        return {"prefill_s": 1.0}

    monkeypatch.setattr(module.stock, "stock_point", stock_point)
    run = measured(census=False, stock=("dynamic", "static"))
    assert asked == [("dynamic", (3, 400), 6), ("static", (3, 400), 6)]
    parts = {"prompt": 400, "batch": 3, "new_tokens": 6}
    assert run.figures["stock"]["dynamic"] == {"status": "ok", **parts, "prefill_s": 1.0}
    lost = run.figures["stock"]["static"]
    assert (lost["status"], lost["bytes_asked"], lost["phase"], lost["weights"]) == ("oom", 77, "search", 12)


def test_random_keys_have_no_prefill(measured, monkeypatch) -> None:
    calls: list[Any] = []

    def go_on(model: Any, cache: Any, batch: int, tokens: int, **named: Any) -> Generation:
        calls.append((batch, tokens, named["max_new_tokens"], named["seed"], named["graphs"]))
        return Generation([[1] * 6] * batch, [], [], 0.0, [2.0] * 5, [])

    monkeypatch.setattr(module, "go_on", go_on)
    run = measured(fill="random", census=False, untimed=1, repeats=5, seed=9)
    assert calls == [(1, 256, 4, 9, "never"), (3, 400, 6, 9, "always")] and run.calls == []
    figures = run.figures
    assert (figures["fill"], figures["prefill_s"], figures["ttft_s"], figures["prefill_path"]) == (
        "random",
        None,
        None,
        None,
    )
    assert figures["tokens_per_s"] == 3 * 5 / 10.0
    assert figures["predicted"][-1] == 3 * 400


def test_memory_that_ran_out_says_in_which_phase(measured, monkeypatch) -> None:
    released: list[Any] = []
    run = measured(census=False)
    monkeypatch.setattr(module, "release", released.append)

    def full(model: Any, cache: Any, ids: Any, **named: Any) -> Any:
        named["observer"].phase("decode")
        raise MemoryError("tried to allocate 77 bytes" + "x" * 999)

    monkeypatch.setattr(module, "generate", full)
    computed = run.meter.point(40, 2)
    message = ("tried to allocate 77 bytes" + "x" * 999)[:400]
    parts = {"prompt": 40, "batch": 2, "new_tokens": 6, "bytes_asked": computed["bytes_asked"], "weights": 12}
    assert computed == {"status": "oom", **parts, "message": message, "phase": "decode"}
    assert released == [CPU, CPU]

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("something else")

    monkeypatch.setattr(module, "generate", broken)
    with pytest.raises(ValueError, match="something else"):
        run.meter.point(40, 2)


def test_a_watch_notes_the_bytes_before_the_first_step() -> None:
    phases: list[str] = []
    watch = Watch(SimpleNamespace(phase=phases.append))  # type: ignore[arg-type]
    assert watch.at == "search"
    watch.phase("decode")
    assert watch.bytes_before is None
    watch.cache = Cache(0.0)
    watch.phase("prefill")
    assert watch.bytes_before is None and watch.at == "prefill"
    watch.phase("decode")
    assert watch.bytes_before == 10 and phases == ["decode", "prefill", "decode"]
    assert watch.span == (None, None)


def test_a_watch_reads_the_energy_before_the_first_step_and_after_the_last() -> None:
    counter = SimpleNamespace(read=iter((Reading(1.0, 100.0), Reading(21.0, 5100.0))).__next__)
    watch = Watch(SimpleNamespace(phase=lambda name: None, device=CPU), energy=counter)  # type: ignore[arg-type]
    for name in ("prefill", "decode", "steps"):
        watch.phase(name)
    assert watch.at == "decode" and len(watch.readings) == 1  # a capture before the first step does not count
    watch.phase("end")
    assert used(*watch.span, tokens=1000) == {"J_per_token": 5.0, "J": 5000.0, "s": 20.0, "W": 250.0}


def test_a_batch_has_prompts_of_exactly_so_many_tokens() -> None:
    meter = Meter(Toy(), byte_tokenizer(), None, How(new_tokens=2, seed=5))  # type: ignore[arg-type]
    ids, prompts = meter.batch(300, 2)
    assert ids.shape == (2, 300) and prompts.input_ids is ids
    assert (prompts.starts, prompts.lengths) == ([0, 0], [300, 300])
    for row, (first, last) in enumerate(prompts.context_spans):
        assert 0 < first < last <= 300
        assert prompts.queries[row] and prompts.decode(ids[row, first:last].tolist())
    assert not torch.equal(ids[0], ids[1])
    other = Meter(Toy(), byte_tokenizer(), None, How(new_tokens=2, seed=6))  # type: ignore[arg-type]
    assert not torch.equal(other.batch(300, 2)[0], ids) and torch.equal(meter.batch(300, 2)[0], ids)


@pytest.mark.parametrize("searcher", [SimpleNamespace(store="kept"), SimpleNamespace(store=None), SimpleNamespace()])
def test_stored_vectors_come_back_also_after_an_error(monkeypatch, searcher) -> None:
    before = dict(vars(searcher))
    monkeypatch.setattr("kvbench.retrieval.encoders.encoder", lambda name: searcher)
    with pytest.raises(ValueError, match="inside"), fresh_search(SimpleNamespace(encoder="any")):
        assert (getattr(searcher, "store", None) == "kept") is False
        raise ValueError("inside")
    assert vars(searcher) == before
    with fresh_search(SimpleNamespace(encoder=None)), fresh_search(SimpleNamespace()):
        assert vars(searcher) == before


def test_defaults_of_a_measurement() -> None:
    how = How(new_tokens=4)
    assert (how.repeats, how.untimed, how.warm_up, how.seed) == (3, 0, 8, 0)
    assert (how.graphs, how.compile, how.prefill_chunk, how.prefill_rows) == ("always", False, None, "auto")
    assert (how.temperature, how.top_p, how.fill, how.compare, how.stock) == (0.0, 1.0, "prefill", 0, ())
    assert (how.read_rate, how.census, how.options) == (None, True, Options())
