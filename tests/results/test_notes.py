"""Notes below a table: which one is shown for which runs."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.results.notes import notes, untouched
from tests.results.test_tables import run

PEAK = "KV: bytes used by the cache of one sequence; ratio: bytes of method=fp16 divided by KV; peak: "


def with_(label: str = "kivi int2", /, **changes: Any) -> dict[str, Any]:
    content = run(label)
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(content.get(key), dict) else value
    return content


def test_a_plain_run_has_three_notes() -> None:
    assert notes([run("fp16")]) == [
        "±: distance to the farther end of the 95 % interval over samples; Δ: paired difference from fp16 on the"
        " same samples",
        PEAK + "CUDA allocator, including weights",
        "device: a GPU",
    ]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"peak_bytes": {"kind": "cpu_live_tensors"}}, PEAK + "live tensors including weights, counted on the longest"),
        ({"config": {"batch_size": 4}}, "batches of 4 prompts: TTFT, TPOT and peak are those of a whole batch"),
        (
            {"env": {"dtype": "float32", "arithmetic": "bfloat16"}},
            "kivi int2 dtype=float32: stored in float32, so ratios refer to method=fp16 with 4 bytes per element",
        ),
        (
            {"env": {"dtype": "bfloat16", "arithmetic": "bfloat16", "slower": "no room"}},
            "kivi int2: arithmetic in bfloat16, slow on this CPU: no room",
        ),
        ({"speculation": {"rounds": 1}}, "accepted: share of drafts that were accepted"),
        ({"samples": {"truncated": 3}}, "3 prompts exceeded the model's limit and were cut in the middle"),
        (
            {"untouched": {"key": "method.residual", "value": 64, "exact": 63, "longest": 40}},
            "kivi int2: nothing was packed or dropped: the longest sample had 40 tokens in the cache, and "
            "method.residual=64 keeps up to 63 in full precision",
        ),
        (
            {"env": {"weights": {"source": "awq", "bits": 4, "groups": [128], "head": False, "bytes": 2**32}}},
            "weights of tiny: 4 bits, of the AWQ checkpoint, groups of 128, output head 16 bits, 4 GiB in all",
        ),
        (
            {"env": {"weights": {"source": "rounded", "bits": 4, "groups": [128, 64], "head": True, "bytes": 2**20}}},
            "weights of tiny: 4 bits, rounded while loaded, groups of 128 and 64, output head 4 bits, 1 MiB in all",
        ),
        ({"ttft_s": {"n": 0}}, "TTFT, TPOT: '-' means that only the warm-up batch ran"),
        ({"code": {"a": 1, "b": 2}}, "kivi int2: the samples were made by different versions of the code"),
        (
            {"older": {"samples": 2, "parts": ["method"]}},
            "kivi int2: 2 of 20 samples, older code: method; set runtime.rerun=true to repeat them",
        ),
        (
            {"baseline_differs": ["cache", "decoding"]},
            "kivi int2: the fp16 run that it is compared with was made by different code: cache, decoding",
        ),
    ],
)
def test_each_note_has_its_reason(changes: dict[str, Any], note: str) -> None:
    plain, more = notes([run("fp16")]), notes([with_(**changes), run("fp16")])
    assert any(line.startswith(note) for line in more), more
    assert not any(line.startswith(note) for line in plain)
    assert len(more) == 4


@pytest.mark.parametrize("kind", ["fidelity", "perplexity"])
def test_runs_over_given_tokens_are_not_said_to_lack_samples_or_quiet(kind: str) -> None:
    """Nothing of them is timed: a larger limit gives no times, and a busy machine spoils none."""
    busy = {"load": {"cpus": 2, "own_cpus": 1.0, "other_cpus": 1.0}}
    given = with_(scores={"books": {kind: {"mode": "decode"}}}, ttft_s={"n": 0}, tpot_s={"n": 0}, env=busy)
    given["scores"] = {"books": given["scores"]["books"]}
    text = "\n".join(notes([given]))
    assert "'-' where predictions of given tokens are compared, which are not timed" in text
    assert "warm-up" not in text and "other programs" not in text
    assert ("KL: divergence from fp16's predictions in nats per token" in text) == (kind == "fidelity")
    assert "other programs" in "\n".join(notes([with_(env=busy)]))
    assert "other programs" not in "\n".join(notes([with_(env=busy, ttft_s={"n": 0})])), "a warm-up alone has no times"


def test_arithmetic_is_named_where_it_differs() -> None:
    wide, narrow = {"dtype": "bfloat16", "arithmetic": "float32"}, {"dtype": "bfloat16"}  # older runs name only one
    text = notes([with_(env=wide), with_(label="kivi int4", env=wide), with_(label="atom", env=narrow)])
    assert "arithmetic: float32 for kivi int2, kivi int4; bfloat16 for atom" in text
    assert not any(line.startswith("arithmetic") for line in notes([with_(env=wide), with_(label="atom", env=wide)]))


def test_an_exact_head_has_the_bits_of_the_dtype() -> None:
    form = {"source": "rounded", "bits": 4, "groups": [128], "head": False, "bytes": 2**20}
    for env, bits in (({"dtype": "float32"}, 32), ({"dtype": "bfloat16", "arithmetic": "float32"}, 32), ({}, 16)):
        (line,) = [x for x in notes([with_(env={**env, "weights": form})]) if x.startswith("weights of")]
        assert f"output head {bits} bits" in line


def test_the_times_of_a_round_are_explained_if_there_are_any() -> None:
    def lines(speculation: dict[str, Any]) -> list[str]:
        return [line for line in notes([with_(speculation=speculation)]) if line.startswith("round: ")]

    assert lines({"rounds": 1}) == []
    assert len(lines({"rounds": 1, "round_times": {"draft_s": 1.0}})) == 1


def test_a_run_whose_code_is_known_and_one_has_no_doubt() -> None:
    assert len(notes([with_(code={"a": 20}, older=None, baseline_differs=[])])) == 3


def test_doubts_that_runs_share_are_said_once_for_all() -> None:
    differing = [with_(label, baseline_differs=["cache"]) for label in ("a", "b", "c", "d", "e")]
    (line,) = [line for line in notes(differing) if "different code" in line]
    assert line.startswith("a, b, c and 2 more: the fp16 run")
    (line,) = [line for line in notes(differing[:3]) if "different code" in line]
    assert line.startswith("a, b, c: the fp16 run")


def test_sizes_modes_devices_and_the_largest_count_are_listed() -> None:
    perplexity = {"ppl": 7.0, "stderr": None, "mode": "decode"}
    runs = [
        with_(config={"batch_size": 8}, env={"device_name": "B"}, samples={"truncated": 2}),
        with_(config={"batch_size": 2}, env={"device_name": "A"}, samples={"truncated": 5}),
        with_(env={"device_name": None}, scores={"text": {"score": None, "n": 1, "perplexity": perplexity}}),
    ]
    lines = notes(runs)
    assert any(line.startswith("batches of 2 and 8 prompts") for line in lines)
    assert any(line.startswith("5 prompts exceeded") for line in lines)
    assert "ppl: perplexity over windows of the model's tokens, mode decode; lower is better" in lines
    assert lines[-1] == "device: A; B"
    assert notes([with_(env={"device_name": None})])[-1] == "device: unknown"


def test_the_reason_why_nothing_was_packed() -> None:
    reach = {"key": "method.budget", "value": 0.5, "exact": 32, "longest": 31}
    assert untouched({"untouched": reach}) == (
        "nothing was packed or dropped: the longest sample had 31 tokens in the cache, and method.budget=0.5 keeps up"
        " to 32 in full precision"
    )


def test_a_table_of_points_has_notes_of_its_own() -> None:
    points = {"batches": {"1": {"status": "ok", "tokens_per_s": 1.0, "beyond": 50}, "2": {"status": "oom"}}}
    content = with_()
    content["scores"] = {"efficiency@64": {"score": None, "n": 0, "points": points}}
    lines = notes([content])
    assert lines[0].startswith("TTFT: time of search and prefill") and lines[-1] == "device: a GPU"
    assert lines[1] == (
        "some sequences exceed model.max_length=50, which is possible only because the weights are random"
    )
    del points["batches"]["1"]["beyond"]
    assert len(notes([content])) == 2
    points["batches"]["1"] |= {"forced": 0.0, "round_times": {"draft_s": 1.0}}
    rounds, forced = notes([content])[1:3]
    assert rounds.startswith("round: mean time of a round")
    assert forced.startswith("forced acceptance: drafts were accepted by chance, so the text is meaningless")
