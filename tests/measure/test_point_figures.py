"""Figures of a measured point."""

from types import SimpleNamespace

import pytest
import torch

from kvbench.decoding.autoregressive import Generation
from kvbench.decoding.round_times import Round
from kvbench.measure import point_figures
from kvbench.measure.point_figures import (
    first_tokens,
    layer_bytes,
    per_sequence,
    point_memory,
    point_times,
    predicted_point,
    rounded_figures,
    step_traffic,
    token_times,
    weight_bytes,
)


def test_a_tokens_time_is_the_rounds_over_the_mean_of_the_rows_that_got_any():
    rounds = [Round(1.2, [], [], [], [2, 4]), Round(1.0, [], [], [], [5]), Round(0.9, [], [], [], [0, 3, 0])]
    assert token_times(rounds) == pytest.approx([0.4, 0.2, 0.3])


def test_bytes_that_weights_share_count_once():
    model = torch.nn.Module()
    model.embedding = torch.nn.Embedding(10, 8)
    model.head = torch.nn.Linear(8, 10, bias=False)
    model.head.weight = torch.nn.Parameter(model.embedding.weight.data)  # a parameter of its own on the same bytes
    model.register_buffer("scale", torch.zeros(3, dtype=torch.float16))
    model.register_buffer("part", model.scale[:1])
    assert weight_bytes(model) == 10 * 8 * 4 + 3 * 2


def test_every_time_of_a_generation():
    steps = [9.0, *(float(number) for number in range(1, 12))]
    plain = Generation([[1] * 13], [], ["length"], 0.5, steps, [4], stepping="graph", capture_s=0.1234567)
    computed = point_times(plain, [0.4, 0.9, 0.5], [0.3, 0.1, 0.2], batch=3, new_tokens=13)
    assert computed == {
        "search_s": 0.2,
        "prefill_s": 0.5,
        "ttft_s": 0.7,  # the median of the sums .7, 1.0 and .7
        "repeats": 3,
        "first_step_s": 9.0,
        "tpot_s": {"median": 6.0, "mean": 6.0, "p10": 2.0, "p90": 10.0, "p99": 10.9, "n": 11},
        "itl_s": {"p50": 6.5, "p90": 9.9, "p99": 10.89},
        "decode_s": 75.0,
        "tokens_per_s": pytest.approx(3 * 13 / (0.2 + 0.5 + 75.0), abs=1e-6),
        "stepping": "graph",
        "capture_s": 0.123457,
    }


def test_tpot_is_a_mean_over_tokens_and_a_median_over_steps():
    plain = Generation([[1] * 5], [], ["length"], 0.5, [9.0, 1.0, 1.0, 4.0], [4])
    computed = point_times(plain, [0.5], [0.0], batch=1, new_tokens=5)
    assert computed["tpot_s"]["median"] == 1.0 and computed["tpot_s"]["mean"] == 2.0
    rounds = [Round(8.0, [1], [1], [1], [2]), Round(3.0, [1], [1], [1], [3]), Round(4.0, [1], [1], [0], [1])]
    drafted = Generation([[1] * 7], [], ["length"], 0.5, [8.0, 3.0, 4.0], [4], rounds=rounds)
    computed = point_times(drafted, [0.5], [0.0], batch=1, new_tokens=7)
    assert computed["tpot_s"]["median"] == computed["tpot_s"]["mean"] == 7 / 4
    assert first_tokens(drafted) == 2.0 and first_tokens(plain) == 1
    drafted.rounds[0].emitted[:] = [2, 4, 0]
    assert first_tokens(drafted) == 2.0
    drafted.rounds[0].emitted[:] = [1, 4]
    assert first_tokens(drafted) == 2.5


def bill(used: int, reserved: int):
    parts = {"used": {"total": used}, "reserved": {"total": reserved}, "fp16_equivalent": 99}
    return SimpleNamespace(as_dict=lambda: parts)


@pytest.mark.parametrize("decode", [1000, None])
def test_the_peak_of_decoding_stands_beside_what_is_stored_and_what_is_allocated(decode):
    model = torch.nn.Linear(4, 5, bias=False)
    cache = SimpleNamespace(bill=lambda: bill(120, 170))
    peaks = {"prefill": 2000, "decode": decode}
    assert point_memory(model, cache, peaks) == {
        "weights": 80,
        "kv_used": {"total": 120},
        "kv_reserved": {"total": 170},
        "kv_fp16": 99,
        "peak": peaks,
        "over_used": decode and 5.0,
        "over_reserved": decode and 4.0,
    }


class Toy(torch.nn.Module):
    """A model of 30 bfloat16 parameters, with the configuration of a small llama."""

    def __init__(self, **changes):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(5, 6, dtype=torch.bfloat16))
        numbers = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 3,
            "tie_word_embeddings": True,
        }
        own = SimpleNamespace(**{key: value for key, value in {**numbers, **changes}.items() if value is not None})
        self.config = SimpleNamespace(get_text_config=lambda decoder: own)
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")


def test_a_layer_in_full_precision_has_keys_and_values_of_every_head():
    assert layer_bytes(Toy(), prompt=10, batch=3) == 2 * 3 * 2 * 8 * 10 * 2
    assert layer_bytes(Toy(num_key_value_heads=None), prompt=10, batch=3) == 2 * 3 * 4 * 8 * 10 * 2
    assert layer_bytes(Toy(head_dim=None), prompt=10, batch=3) == 2 * 3 * 2 * 4 * 10 * 2


@pytest.mark.parametrize(("tied", "weights"), [(True, 60), (False, 60 - 3 * 16 * 2)])
def test_a_step_reads_the_weights_and_what_is_stored(tied, weights):
    model, figures = Toy(tie_word_embeddings=tied), {"kv_used": {"total": 1000}, "tpot_s": {"median": 0.5, "mean": 9.0}}
    computed = step_traffic(model, {**figures, "predicted": {"tpot_s": 0.25}}, read_rate=1e-5)
    rate = (1000 + weights) / 0.5 / 1e9
    assert computed == {
        "read_bytes": 1000 + weights,
        "GB_s": pytest.approx(rate),
        "ceiling": {"GB_s": 1e-5, "kind": "measured"},
        "read_share": pytest.approx(rate / 1e-5),
        "over_roof": 2.0,
    }
    unknown = step_traffic(model, {**figures, "predicted": None})
    assert unknown["ceiling"] is None and unknown["read_share"] is None and unknown["over_roof"] is None
    assert step_traffic(model, {**figures, "speculation": {"rounds": 1}}, 1.0) == {"read_bytes": 1000 + weights}
    assert step_traffic(Toy(num_experts=8), figures) == {}


def test_the_known_bandwidth_of_a_gpu_is_the_ceiling_unless_one_was_measured(monkeypatch):
    monkeypatch.setattr(point_figures, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(point_figures, "gpu_of", lambda name: SimpleNamespace(read=3e12) if name == "a GPU" else None)
    figures = {"kv_used": {"total": 1000}, "tpot_s": {"median": 0.5}}
    assert step_traffic(Toy(), figures)["ceiling"] == {"GB_s": 3000.0, "kind": "known"}
    assert step_traffic(Toy(), figures, 5.0)["ceiling"] == {"GB_s": 5.0, "kind": "measured"}


@pytest.mark.parametrize(
    ("held", "drafted", "together", "read", "chunk"),
    [(None, False, None, 1000, None), (500, False, 40, 750.0, 14), (500, True, 30, 750.0, 10)],
)
def test_the_roofline_is_asked_for_the_mean_of_the_cache_and_the_largest_pass(
    monkeypatch, held, drafted, together, read, chunk
):
    calls = []

    def predict(shape, *args, **named):
        calls.append((shape.layers, *args, named))
        return SimpleNamespace(
            ttft_s=1.0, tpot_s=2.0, expected_tpot_s=3.0, bound="memory", prefill_peak_bytes=4, decode_peak_bytes=5
        )

    gpu = SimpleNamespace(name="h200")
    monkeypatch.setattr(point_figures, "predict", predict)
    monkeypatch.setattr(point_figures, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(point_figures, "gpu_of", lambda name: gpu)
    prediction = predicted_point(Toy(), {"kv_used": {"total": 1000}}, 20, 3, held, drafted, together)
    assert calls == [(2, read, 60, 3, 20, gpu, {"kv_stored_bytes": 1000, "prefill_chunk": chunk, "width": 2})]
    assert prediction == {
        "gpu": "h200",
        "ttft_s": 1.0,
        "tpot_s": None if drafted else 2.0,
        "expected_tpot_s": None if drafted else 3.0,
        "bound": "memory",
        "peak_prefill": 4,
        "peak_decode": 5,
    }


def test_bytes_of_a_sequence_are_whole_and_add_up():
    figures = {
        "batch": 3,
        "kv_used": {"codes": 10, "window": 8, "total": 18},
        "kv_reserved": {"codes": 20, "window": 9, "total": 29},
        "kv_fp16": 100,
    }
    assert per_sequence(figures) == {
        "used": {"codes": 3, "window": 2, "total": 5},
        "reserved": {"codes": 6, "window": 3, "total": 9},
        "fp16_equivalent": 33,
    }


def test_figures_are_rounded_to_microseconds_at_any_depth():
    computed = rounded_figures({"a": 0.12345678, "b": {"c": 0.98765432, "d": "text"}, "e": 3, "f": None})
    assert computed == {"a": 0.123457, "b": {"c": 0.987654, "d": "text"}, "e": 3, "f": None}
