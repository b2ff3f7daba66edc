"""The table of formats: its lines exist, and its fold computes paired differences of scores, bits and divergences."""

import json

import pytest

from experiments import measured
from experiments.formats.__main__ import parse_formats_options, table_of
from experiments.formats.fold import apart, fold_formats
from experiments.formats.grid import CLAIMS, ROWS
from experiments.formats.which import LATER, SOURCE, bits, settings, step_milliseconds
from experiments.measured import Stored
from kvbench.config.setting import parse_setting


def test_every_line_is_a_setting_for_heads_of_64_channels_and_every_claim_has_its_lines():
    for row in ROWS.values():
        parse_setting(row.setting).load().check(64)
    assert {name for _, pairs in CLAIMS for pair in pairs for name in pair} <= ROWS.keys()


def row(number, score, used, kld):
    n = len(kld)
    forced = {"kld": kld, "change": [0.0] * n, "nll_base": [1.0] * n, "nll": [1.0] * n, "other_top": []}
    forced |= {"mode": "decode", "statistics": "exact", "answers": "fp16", "reference": "stored", "left": None}
    return {
        "id": f"repeat@1024/{number}",
        "task": "repeat",
        "length": 1024,
        "scores": {"score": score},
        "kv_bytes": {"used": {"total": used}, "fp16_equivalent": 1600},
        "fidelity": forced,
    }


def runs(scores, used, kld):
    rows = {f"repeat@1024/{i}": row(i, score, used, [kld * (1 + i)] * 3) for i, score in enumerate(scores)}
    env = {"device": "cpu", "dtype": "float32", "torch": "2", "transformers": "5"}
    return Stored({"mini": rows, "fidelity": rows}, env)


@pytest.fixture
def folded(tmp_path):
    lines = {
        "fp16 | own": runs([1, 1, 1, 1], 1600, 1e-9),
        "KVarN k4v4 | own": runs([1, 1, 1, 0], 450, 0.01),
        "TurboQuant 4 bits | own": runs([1, 0, 0, 0], 400, 0.04),
        "kivi int4 G32 | own": runs([1], 500, 0.02),
    }
    table = fold_formats(lines, 4, 4)
    table.write(tmp_path)
    return (
        table.text,
        json.loads((tmp_path / "lines.json").read_text()),
        json.loads((tmp_path / "claims.json").read_text()),
    )


def test_lines_have_bits_and_paired_differences(folded):
    text, content, _ = folded
    line = next(line for line in content["lines"] if line["name"] == "KVarN k4v4")
    assert line["bits"] == 4.5
    assert line["vs_fp16"]["diff"] == -0.25
    assert line["vs_fp16"]["stderr"] == pytest.approx(0.25)
    assert line["kld"]["mean"] == pytest.approx(0.025)
    assert "kivi int4 G32 | own" in content["missing"]  # it has fewer samples than the others
    assert "| KVarN k4v4 | 4.50 | 250 (" in text


def test_a_claim_is_the_first_less_the_second(folded):
    _, _, claims = folded
    claim = next(claim for claim in claims if claim["worse"].startswith("TurboQuant 4 bits"))
    assert claim["score"]["diff"] == 0.5
    assert claim["bits"] == [4.5, 4.0]
    assert claim["kld"]["kld_mean"]["diff"] == pytest.approx(-0.075)
    assert apart(claim) == "KL: first"
    claim["score"] = {"diff": -0.5, "stderr": 0.1}
    assert apart(claim) == "KL: first, score: second"


def test_without_fp16_there_is_no_table():
    table = fold_formats({"kivi int4 G32 | own": runs([1], 500, 0.02)}, 1, 1)
    assert table.text.startswith("fp16 does not have") and not table.files


def test_times_are_found_however_their_settings_are_spelled(tmp_path):
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    times = {"fp16": 7.6, "engine": 5.1, "kvarn:int4_g128:sinks=128": 5.0, "kivi:int8": 6.0}

    def row(setting, ms, prompt=32768, status="ok"):
        return {"setting": setting, "tpot_s": {"median": ms / 1e3}, "status": status, "prompt": prompt}

    first = [*(row(name, ms) for name, ms in times.items()), row("engine:format=fp8", 1.0, status="failed")]
    later = [row("kvarn:int4_g128:sinks=128", 9.0), row("engine:format=iq4_nl", 6.2), row("fp16", 18.6, 131072)]
    later.append(row("engine:format=nvfp4", 8.1, 131072))  # of another length
    for path, rows in ((SOURCE, first), (LATER, later)):
        (tmp_path / path).write_text(json.dumps({"rows": rows}))
    lines = step_milliseconds(tmp_path)
    wanted = {"fp16 | own": 7.6, "vLLM int4 per token | open": 5.1, "KVarN k4v4 | own": 5.0}
    iq4_nl = {key: ms for key, ms in lines.items() if key.startswith("iq4_nl")}
    assert lines == pytest.approx({**wanted, **iq4_nl}) and list(iq4_nl.values()) == pytest.approx([6.2])
    assert lines.keys() <= ROWS.keys()


def test_every_setting_to_be_timed_fits_a_model_with_heads_of_128_channels():
    assert settings()["fp16"] == "fp16" and "SAW-INT4" not in settings()
    for setting in settings().values():
        parse_setting(setting).load().check(128)


@pytest.mark.parametrize(
    ("setting", "per_element"),
    [("engine:format=q8_0", 8.5), ("kivi:int4_g128:residual=128", 4.25), ("kvarn:sinks=64:window=256", 3.375)],
)
def test_bits_are_those_of_packed_tokens_alone(setting, per_element):
    assert bits(setting) == per_element


def test_a_line_that_cannot_run_is_missing_and_its_reason_is_shown(tmp_path, capsys):
    given = ["--length", "256", "--runs", str(tmp_path), "--out", str(tmp_path / "out"), "--only", "fp16 | own"]
    arguments = parse_formats_options(given)
    assert measured.stored(table_of(arguments), ROWS["fp16 | own"], arguments).rows == {"fidelity": {}, "mini": {}}
    assert measured.make_table(table_of(arguments), arguments, given) == 1 and not list(tmp_path.iterdir())
    assert "fp16 | own: skipped: dataset.lengths=256" in capsys.readouterr().err
