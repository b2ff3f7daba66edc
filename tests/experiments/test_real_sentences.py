"""A trained model: sentences and tables of docs/which-format.md follow from the stages' files by their rules."""

from __future__ import annotations

import json
import math

import pytest

from experiments import stored
from experiments.real import fold, pages, sentences
from experiments.real.stages import FACTORED, FACTORS, LINES

COLUMN = "WikiText-2 1k"
FACTOR_COLUMNS = [f"factor {factor}" for factor in FACTORS]
BY_KEY = {setting.key: setting for setting in LINES}
NOISE = (0.9, 1.0, 1.1, 1.0)
PAIR = ("int8 per token | open", "fp8 | open")


def fidelity_row(number, klds, other=(), loss=1.0):
    part = {
        "kld": klds,
        "other_top": list(other),
        "mode": "decode",
        "nll": [1.0 + loss] * len(klds),
        "nll_base": [1.0] * len(klds),
    }
    return {"id": f"w/{number}", "fidelity": part}


def run(values, loss=1.0):
    return fold.run_figures([fidelity_row(number, [value, value], (), loss) for number, value in enumerate(values)])


def kl_line(name, **runs):
    known = BY_KEY[name]
    return {"name": name, "family": known.family, "setting": known.setting, "runs": runs}


def stage_of(lines, model="m"):
    return {"about": "KL", "model": model, "missing": [], "machine": {"device_name": "Abacus"}, "lines": lines}


def kl_file(**values):
    return stage_of([kl_line(name, **{COLUMN: run(own)}) for name, own in values.items()])


def scaled(**values):
    return kl_file(**{name: [scale * x for x in NOISE] for name, scale in values.items()})


def tiny_line(key, mean, width=0.1):
    name, _, tail = key.partition(" | ")
    kld = {"mean": mean, "low": (1 - width) * mean, "high": (1 + width) * mean}
    return {"name": name, "tail": tail, "kld": kld}


def small(first, second):
    return [tiny_line(key, mean) for key, mean in zip(PAIR, (first, second), strict=True)]


def said(first, second, tiny=()):
    (sentence,) = sentences.pair_sentences(scaled(**dict(zip(PAIR, (first, second), strict=True))), tiny)
    return sentence


def test_sentences_follow_from_the_paired_interval_and_turn_with_its_sign():
    assert "`int8 per token` is closer to fp16 than `fp8`: KL 1 against 10 " in said(0.001, 0.01)
    assert "`fp8` is closer to fp16 than `int8 per token`: KL 1 against 10 " in said(0.01, 0.001)
    assert "(difference -9, -" in said(0.001, 0.01) and "(difference -9, -" in said(0.01, 0.001)  # of the closer one
    single = kl_file(**{PAIR[0]: [0.001], PAIR[1]: [0.01]})
    assert "cannot be told apart (difference -9, n = 1)" in sentences.pair_sentences(single, ())[0]
    noisy = kl_file(**{PAIR[0]: [1.0, 3.0, 1.0, 3.0], PAIR[1]: [3.0, 1.0, 3.1, 1.0]})
    assert "cannot be told apart" in sentences.pair_sentences(noisy, ())[0]
    # the intervals of the two overlap, their paired difference does not
    shifted = kl_file(**{PAIR[0]: [1.0, 2.0, 3.0], PAIR[1]: [1.1, 2.1, 3.11]})
    assert "`int8 per token` is closer" in sentences.pair_sentences(shifted, ())[0]


def test_sentences_name_where_the_bundled_model_says_otherwise():
    assert "`tiny` says otherwise: there `fp8` is closer." in said(0.001, 0.01, small(0.02, 0.01))
    assert "`tiny` does not tell them apart." in said(0.001, 0.01, small(0.01, 0.011))
    assert "tiny" not in said(0.001, 0.01, small(0.001, 0.01)) and "tiny" not in said(0.001, 0.01)
    third = "q8_0, rotated | open"  # a second pair of the same subject
    tiny = [*small(0.01, 0.011), tiny_line(third, 0.0105)]
    (text,) = sentences.pair_sentences(scaled(**{PAIR[0]: 0.01, PAIR[1]: 0.1, third: 0.001}), tiny)
    assert text.count("tiny") == 1 and text.endswith("`tiny` does not tell any of these apart.")


def test_the_closest_of_a_class_those_beside_it_and_the_farthest():
    keys = {
        "q4_0, rotated | open": 0.01,
        "nvfp4 | open": 0.05,
        "kivi int4 G32 | own": 0.02,
        "kivi int4 G32 | open": 1.0,
    }
    (text,) = sentences.short_sentences(scaled(**keys), ())[:1]
    assert text.startswith("- **4 bits.** As shipped, `q4_0, rotated` is closest to fp16: KL 10, 0.0 % flips;")
    assert text.endswith("; `nvfp4` is farthest (50).")  # KIVI's line with its own exact tokens is the one that counts
    tied = scaled(**keys)
    tied["lines"][1] = kl_line("nvfp4 | open", **{COLUMN: run([0.009, 0.012, 0.011, 0.01])})
    assert (
        "; `nvfp4` cannot be told apart from it; `kivi int4 G32` is farthest (20)."
        in sentences.short_sentences(tied, ())[0]
    )
    tiny = [
        tiny_line("q4_0, rotated | open", 0.01),
        tiny_line("nvfp4 | open", 0.001),
        tiny_line("kivi int4 G32 | own", 0.01),
    ]
    assert sentences.short_sentences(scaled(**keys), tiny)[0].endswith(
        " `tiny` says otherwise: there `nvfp4` is closer."
    )
    wide = {"q4_0, rotated | wide": 0.03, "nvfp4 | wide": 0.02}
    (text,) = sentences.short_sentences(scaled(**keys | wide), ())[:1]
    assert "With 64 first and 256 newest exact tokens, `nvfp4` is closest to fp16: KL 20" in text
    assert not any("bits.**" in line for line in sentences.short_sentences(scaled(**{"fp8 | open": 1.0}), ()))


def test_the_fewest_bits_for_a_share_of_perplexity_on_every_text():
    def file(**losses):
        runs = {name: {COLUMN: run(NOISE, one), "Python 1k": run(NOISE, two)} for name, (one, two) in losses.items()}
        return stage_of([kl_line(name, **own) for name, own in runs.items()])

    low, high = math.log(1.009), math.log(1.011)
    whole = file(**{"fp8 | open": (low, low), "nvfp4 | open": (low, high), "kivi int2 G32 | own": (0.2, low)})
    whole["lines"].append(kl_line("KVarN k2v2 | own", **{COLUMN: run(NOISE, low)}))  # on one text alone
    (one, ten) = sentences.short_sentences(whole, ())[-2:]
    assert "At most 1 % more" in one and one.endswith("`fp8` (8 bits).")
    assert "At most 10 % more" in ten and ten.endswith("`nvfp4` (4.5 bits).")
    assert sentences.most_lost(whole["lines"][1]) == pytest.approx(0.011, rel=1e-4)
    for figures in whole["lines"][0]["runs"].values():  # of an older file
        figures.pop("loss")
    assert sentences.most_lost(whole["lines"][0]) is None


def factor_file(model="m", **scales):
    lines = [kl_line("fp16 | own", **{column: run(NOISE) for column in FACTOR_COLUMNS})]
    for name, own in scales.items():
        runs = {c: run([scale * x for x in NOISE]) for c, scale in zip(FACTOR_COLUMNS, own, strict=True)}
        lines.append(kl_line(f"{name} | open", **runs))
    return stage_of(lines, model)


def test_where_a_format_breaks_and_which_order_turns_round():
    whole = factor_file(**{"int8 per token": (1, 1.9, 2.1, 90), "fp8": (6, 6, 6, 6.5), "nvfp4": (7, 15, 40, 80)})
    hold, late, early, turn = sentences.break_sentences(whole, None)
    assert hold == "- **Hold up to factor 64**: `fp8` (6,000 to 6,500)."
    assert late == "- **Break at factor 16**: `int8 per token` (1,000 to 2,100)."
    assert early == "- **Break at factor 4**: `nvfp4` (7,000 to 15,000)."
    assert turn == "- **The order turns round**: `int8 per token` is closer at factor 1, `fp8` at factor 64."
    tiny = factor_file("tiny", **{"int8 per token": (1, 1, 1, 1), "fp8": (6, 6, 6, 6.5), "nvfp4": (7, 7, 7, 90)})
    other = sentences.break_sentences(whole, tiny)[-1]
    assert other == "- **`tiny` says otherwise**: there `int8 per token` holds, `nvfp4` breaks at factor 64."
    for file in (whole, tiny):  # a format that was not measured at the largest factor is not said to hold there
        line = next(line for line in file["lines"] if line["name"].startswith("fp8 "))
        line["runs"].pop("factor 64")
        assert "fp8" not in "".join(sentences.break_sentences(whole, tiny))
    # twice as much on average, but not told apart
    noisy = kl_line("fp8 | open", **{"factor 1": run([1.0, 1.0, 1.0, 1.0]), "factor 4": run([0.1, 9.0, 0.1, 0.1])})
    assert sentences.breaks_at(noisy, FACTOR_COLUMNS) is None


def test_a_format_without_its_base_is_not_known_to_hold():
    whole = factor_file(**{"fp8": (6, 6, 6, 6.5), "nvfp4": (7, 7, 7, 8)})
    del whole["lines"][2]["runs"]["factor 1"]
    whole["missing"] = ["nvfp4 | open (factor 1)", "int8 per token | open"]
    holds, unknown = (text.split(" | ")[-1] for text in pages.factors_table(whole)[2:])
    assert (holds, unknown) == ("- |", "not known |")
    assert "Not run: nvfp4 (factor 1), int8 per token." in pages.factors_basis(whole)


def test_tables_of_the_page():
    tiny = small(0.02, 0.01)
    whole = scaled(**{PAIR[0]: 1, PAIR[1]: 2, "nvfp4 | wide": 1, "nvfp4 | open": 3, "q4_0, rotated | open": 2})
    head, _, *body = pages.formats_table(whole, None, tiny)
    assert "| KL, WikiText-2 1k | KL 99.9 % | flips, % | perplexity, % more: WikiText-2 1k |" in head
    names = [text.split("|")[1].strip() for text in body]
    assert names == ["int8 per token", "fp8", "q4_0, rotated", "nvfp4"]  # by bits, then by KL divergence
    assert body[0] == "| int8 per token | 8.5 | 1,000 ±130 | 1,100 | 0 | 172 | 20 |"
    equal = "\n".join(pages.equal_tables(whole, tiny))
    assert equal.index("| nvfp4 | 4.5 | 1,000") < equal.index("<details") < equal.index("| nvfp4 | 4.5 | 3,000")
    weights = stage_of([{"name": "a against b", "family": "weights", "setting": "b", "runs": {COLUMN: run(NOISE)}}])
    assert pages.formats_table(whole, None, tiny, weights)[-1].startswith("| *weights: a against b* | - | 1,000 ±130 |")
    assert pages.formats_table(scaled(**{PAIR[0]: 1}), "wide", tiny) == [pages.MISSING.format("kl")]
    text = pages.basis_text(whole | {"missing": ["OSCAR int2 | own"]})
    assert "WikiText-2 1k: n = 4, the last 2 tokens of each, fp16's perplexity 2.72. Measured on Abacus." in text
    assert text.endswith(" Not run: OSCAR int2 | own.")
    factors = pages.factors_table(factor_file(**{"fp8": (0.006, 0.006, 0.02, 0.03)}))
    assert factors[-1].startswith("| fp8 | 6 ±0.78 | 6 ±0.78 | 20 ±2.6 | 30 ±3.9 | 16 |") and len(factors) == 3


def test_the_whole_page_is_written_from_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "BUNDLED", tmp_path / "results/tiny")
    monkeypatch.setattr(pages, "FOLDER", tmp_path / "results/real")
    folder = tmp_path / "results/real"
    whole = stage_of([kl_line(one.key, **{COLUMN: run(NOISE)}) for one in LINES])
    factors = factor_file(**{one.name.partition(" | ")[0]: (1, 2, 3, 4) for one in FACTORED[1:]})
    for place, stage in (("real/kl", whole), ("real/outliers", factors), ("tiny/outliers", factors)):
        (tmp_path / "results" / place).mkdir(parents=True)
        (tmp_path / "results" / place / fold.FILE).write_text(json.dumps(stage))
    blocks = pages.page_blocks(folder)
    named = {block.name: block.text for block in blocks if block.document == pages.PAGE}
    parts = "real-short real real-words real-equal outliers outliers-words outliers-tiny".split()
    assert list(named) == parts and all(named.values())
    page = (stored.ROOT / pages.PAGE).read_text(encoding="utf-8")
    assert all(page.count(f"<!-- {name}:begin ") == page.count(f"<!-- {name}:end ") == 1 for name in parts)
    quantizers = {one.name.partition(" | ")[0] for one in LINES} - {"fp16"}
    assert len(named["real"].splitlines()) == len(quantizers) + 5 and pages.NO_WEIGHTS in named["real"]
    assert {block.document for block in blocks} >= {
        f"results/{place}/table.md" for place in ("real/kl", "tiny/outliers")
    }
