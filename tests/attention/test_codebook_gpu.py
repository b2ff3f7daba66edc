"""On a GPU: the decode kernel for a codebook's codes, the kernel that quantizes a token, and captured steps of both."""

import pytest
import torch

from kvbench.attention.synthetic import relative_error
from tests.attention.codebook_support import layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 4.5e-3}  # bf16 alone rounds the output by 2e-3


LAYERS = [
    (4, 1, 128, torch.bfloat16, [(0, 5000, 0)], [0], 0.01),
    (4, 4, 128, torch.bfloat16, [(3, 3001, 2), (3, 0, 5), (3, 130, 1)], [7, 300, 20000], 0.02),
    (2, 1, 64, torch.float16, [(4, 777, 2), (0, 1, 0)], [0, 99], 0.05),
    (32, 1, 128, torch.float16, [(0, 2000, 0)], [1000], 0.01),
    (3, 3, 64, torch.float16, [(0, 600, 1)], [0], 0.0),
    (2, 11, 64, torch.float16, [(0, 300, 40)], [3], 0.3),
]


def check(module, bits, heads, group, channels, dtype, lengths, starts, outliers):
    """Compare a kernel's output with attention in fp32; the same step must give the same bits again."""
    at = layer(
        lengths, bits=bits, heads=heads, channels=channels, dtype=dtype, starts=starts, outliers=outliers, device="cuda"
    )
    query = torch.randn(len(lengths), heads * group, 1, channels, device="cuda").to(dtype) * 1.5
    assert module.refuses(query, at.work) is None
    out = module.attend(query, at.work, channels**-0.5)
    assert relative_error(out, at.exact(query, channels**-0.5)) < TOLERANCE[dtype]
    assert torch.equal(out, module.attend(query, at.work, channels**-0.5))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("at", LAYERS)
def test_layers_by_cuda(bits, at):
    decode = pytest.importorskip("kvbench.attention.codebook.decode")
    if decode.missing():
        pytest.skip(decode.missing())
    check(decode, bits, *at)


@pytest.mark.parametrize(
    ("bits", "heads", "dtype"), [(3, 32, torch.bfloat16), (4, 8, torch.float16), (2, 6, torch.float16)]
)
def test_tokens_are_stored_as_by_torch(bits, heads, dtype):
    from kvbench.cache.kernels import nuq

    x = torch.randn(2, heads, 140, 128, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    held = [
        layer([(0, 120, 0)] * 2, bits=bits, heads=heads, channels=128, dtype=dtype, device="cuda", room=40)
        for _ in (0, 1)
    ]
    (_, keys, _), (_, values, _) = held[1].keys, held[1].values
    for t in range(20):
        new = x[:, :, t : t + 1]
        for side in (held[0].keys, held[0].values):
            side[1].append(slice(None), new)
        places = list(zip(keys.advance(), values.advance(), strict=True))
        nuq.pack_nuq_tokens(keys, values, new, new, torch.tensor(places, dtype=torch.int32, device="cuda"))
    for one, other in ((held[0].keys[1], keys), (held[0].values[1], values)):
        rows = slice(0, 2)
        assert torch.equal(one.codes(rows, 0, 140), other.codes(rows, 0, 140))
        assert all(torch.equal(a[:, :140], b[:, :140]) for a, b in zip(one.params, other.params, strict=True))
        assert one.exact.ends == other.exact.ends
        for row in rows.start, rows.stop - 1:
            count = one.exact.count(row)
            assert torch.equal(one.exact.values[row, :count], other.exact.values[row, :count])
            assert torch.equal(one.exact.indices[row, :count], other.exact.indices[row, :count])


def small_model(dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


def calibration(path, layers, heads, channels, outliers):
    """A calibration file for keys and values that are normally distributed."""
    from kvbench.calibration import file

    border, width = 2.0, heads * channels
    tensors = {}
    for index in range(layers):
        tensors[f"layers.{index}.key.thresholds"] = torch.tensor([[border], [-border]]).repeat(1, width).half()
        for side in ("key", "value"):
            for bits in (2, 3, 4):
                tensors[f"layers.{index}.{side}.levels.{bits}"] = torch.tanh(torch.linspace(-1.5, 1.5, 2**bits))
                tensors[f"layers.{index}.{side}.norm.{bits}"] = torch.tensor([1.0, 0.0])
    info = {
        "format": file.FORMAT, "model": "any", "bits": "2,3,4", "outliers": repr(outliers), "layers": str(layers),
        "kv_heads": str(heads), "head_dim": str(channels), "text_sha256": "", "tokens": "0", "fisher": "false",
    }  # fmt: skip
    file.save(file.Calibration(info, tensors), path)
    return path


@pytest.mark.parametrize("first_tokens", [0, 4])
@pytest.mark.parametrize("compile", [False, True])
def test_captured_steps_decode_the_tokens_of_eager_ones(tmp_path, first_tokens, compile):
    from kvbench.decoding import generate
    from kvbench.methods import load_method

    model = small_model(torch.bfloat16)
    path = calibration(tmp_path / "any.safetensors", 2, 2, 64, 0.02)
    method = load_method("kvquant", bits=3, outliers=0.02, first_tokens=first_tokens, calibration=str(path))
    ids = torch.randint(0, 256, (2, 150), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    results = []
    for graphs in ("never", "always"):
        cache = method.new_cache(model, max_length=400)
        made = generate(model, cache, ids, mask, max_new_tokens=150, graphs=graphs, compile=compile)
        results.append((made, cache))
    (eager, one), (captured, other) = results
    assert captured.stepping.startswith("graph"), captured.stepping
    assert "codebook" in one.path and other.path == "codebook"
    if not compile:
        assert captured.tokens == eager.tokens
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            for a, b in zip(mine.segments(), theirs.segments(), strict=True):
                assert a.lengths == b.lengths
    method.detach(model)
