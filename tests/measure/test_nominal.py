"""Nominal bits of caches of a random two-layer model, filled at random."""

from __future__ import annotations

import pytest

from kvbench.bench.capacity import stored_sequence
from kvbench.cache import Prompts
from kvbench.config.setting import parse_setting
from kvbench.measure.meter import How, Meter
from kvbench.measure.point_figures import nominal_bits
from kvbench.models.load import byte_tokenizer
from tests.zoo import model, padded_batch


@pytest.mark.parametrize(
    ("setting", "bits"),
    [
        ("fp16", (32, 32)),
        ("kivi:int4:residual=32", (4, 4)),
        ("kivi:int8:residual=32", (8, 8)),
        ("kivi:int4:residual=32:quantizer.value.bits=2", (4, 2)),
        ("kivi:int2:residual=128", (2, 2)),
        ("engine:format=q8_0/q4_0", (8, 4)),
        ("hf_quantized:backend=fp8", (8, 8)),
        ("streamingllm:budget=20", (6.4, 6.4)),  # 20 of 100 tokens, in the model's float32
    ],
)
def test_bits_of_formats_without_metadata_and_window(setting, bits):
    tokens = 200 if "=128" in setting else 100
    meter = Meter(model(), byte_tokenizer(), parse_setting(setting).load(), How(new_tokens=4, fill="random"))
    nominal = nominal_bits(stored_sequence(meter, tokens))
    assert (nominal["key"], nominal["value"]) == pytest.approx(bits)


def test_padding_does_not_count():
    own, (ids, mask) = model(), padded_batch([70, 40])
    method = parse_setting("fp16").load()
    cache = method.new_cache(own, Prompts.from_batch(ids, mask))
    own(ids, attention_mask=mask, past_key_values=cache)
    method.detach(own)
    assert nominal_bits(cache) == {"key": 32.0, "value": 32.0}
