"""Four-bit weights beside the exact ones: what they hold, when they run, and that they leave no trace."""

import pytest
import torch
from torch import nn

from kvbench.errors import ModelError
from kvbench.models import int4
from tests import zoo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32)])
def test_the_product_is_that_of_the_rounded_weights(dtype, columns, group):
    torch.manual_seed(0)
    linear = nn.Linear(columns, 48).to(dtype)
    made = int4.Int4Linear(linear)
    assert made.group == group
    assert made.nbytes == 48 * columns // 2 + 2 * 48 * (columns // group) * linear.weight.element_size()
    weight = linear.weight.detach()
    codes, scales = int4.quantize(weight, group, dtype)
    assert int(codes.min()) >= 0 and int(codes.max()) == 15
    scale, zero = scales.float().transpose(0, 1).unbind(-1)
    rounded = ((codes.float().unflatten(-1, (-1, group)) - 8) * scale[..., None] + zero[..., None]).flatten(-2)
    # half a step, and what storing the scale and the zero in the model's dtype adds
    assert ((rounded - weight.float()).abs().unflatten(-1, (-1, group)) <= 0.56 * scale[..., None]).all()
    x = torch.randn(2, 3, columns).to(dtype)
    expected = x.float() @ rounded.T + linear.bias.float()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(made(x).float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("offset", [-100.0, 100.0])
def test_codes_are_four_bits_where_storing_the_zero_in_the_models_dtype_moves_it(offset):
    """The zero of a narrow group far from 0 is rounded by more than a step."""
    weight = offset + torch.rand(16, 64, generator=torch.Generator().manual_seed(0)).sub(0.37)
    codes, _ = int4.quantize(weight, 32, torch.bfloat16)
    assert int(codes.min()) >= 0 and int(codes.max()) <= 15


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_only_drafts_run_the_four_bit_weights_and_detaching_restores_the_model(architecture):
    model = zoo.model(architecture)
    ids, _ = zoo.padded_batch([20])
    with torch.no_grad():
        exact, names = model(ids).logits, [name for name, _ in model.named_modules()]
        ffn = int4.attach(model, "ffn")
        assert int4.attach(model, "ffn") is ffn
        assert torch.equal(model(ids).logits, exact)
        with ffn.drafting():
            draft = model(ids).logits
        linears = [m for m in model.modules() if isinstance(m, int4.DraftLinear)]
        assert len(linears) == {"llama": 6, "phi3": 4}[architecture]  # attention's are left alone
        whole = int4.attach(model, "all")
        with whole.drafting():
            both = model(ids).logits
        assert int4.nbytes(model) > 0
        int4.detach(model)
        assert [name for name, _ in model.named_modules()] == names
        assert torch.equal(model(ids).logits, exact)
    ratio = [float((x - exact).norm() / exact.norm()) for x in (draft, both)]
    assert 0.001 < ratio[0] < ratio[1] < 0.5


def test_what_has_no_four_bit_form_is_said():
    with pytest.raises(ModelError, match="40 input and 48 output channels"):
        int4.Int4Linear(nn.Linear(40, 48))
    with pytest.raises(ModelError, match="decoder layers"):
        int4.attach(nn.Linear(32, 32), "ffn")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "group"), [(384, 128), (832, 64), (96, 32)])
def test_the_product_on_a_gpu_is_that_of_the_rounded_weights(dtype, columns, group):
    torch.manual_seed(0)
    linear = nn.Linear(columns, 64).to("cuda", dtype)
    made = int4.Int4Linear(linear)
    codes, scales = int4.quantize(linear.weight.detach(), group, torch.bfloat16)
    scale, zero = scales.float().transpose(0, 1).unbind(-1)
    rounded = ((codes.float().unflatten(-1, (-1, group)) - 8) * scale[..., None] + zero[..., None]).flatten(-2)
    for count in (1, 5, 40):
        x = torch.randn(count, columns, device="cuda", dtype=dtype)
        expected = x.float() @ rounded.T + linear.bias.float()
        error = (made(x).float() - expected).norm() / expected.norm()
        assert made(x).dtype == dtype and error < 1e-2
