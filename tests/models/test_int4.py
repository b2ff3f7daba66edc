"""Four-bit copies of a model's weights: their content, when they run, and that they leave no trace."""

import pytest
import torch
from torch import nn

from kvbench.errors import ModelError
from kvbench.models import int4
from kvbench.models.quantized.codes import round_weights
from tests import zoo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32)])
def test_the_product_is_that_of_the_rounded_weights(dtype, columns, group):
    torch.manual_seed(0)
    linear = nn.Linear(columns, 48).to(dtype)
    layer = int4.Int4Linear.rounded(linear)
    assert layer.group == group
    assert layer.nbytes == 48 * (-(-columns // 64) * 64) // 2 + 4 * 48 * -(-columns // 64) * 64 // group
    codes, scales, zeros = round_weights(linear.weight, "layer", "")
    centred = codes.float().unflatten(-1, (-1, group)) - zeros.float()[..., None]
    weight = (centred * scales.float()[..., None]).flatten(-2).to(dtype).float()
    x = torch.randn(2, 3, columns).to(dtype)
    expected = x.float() @ weight.T + linear.bias.float()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(layer(x).float(), expected, rtol=tolerance, atol=tolerance)
    assert layer(x).dtype == dtype


def test_a_layer_is_one_operation_of_a_compiled_graph():
    layer = int4.Int4Linear.rounded(nn.Linear(64, 32))
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_only_drafts_run_the_four_bit_weights_and_detaching_restores_the_model(architecture):
    model = zoo.model(architecture)
    ids, _ = zoo.padded_batch([20])
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
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
        assert isinstance(model.lm_head, int4.DraftLinear) and model.get_output_embeddings() is model.lm_head
        assert sum(isinstance(m, int4.DraftLinear) for m in model.modules()) == {"llama": 15, "phi3": 9}[architecture]
        with whole.drafting():
            both = model(ids).logits
        assert 0 < int4.nbytes(model) < int4.own_bytes(model) == weights
        int4.detach(model)
        assert [name for name, _ in model.named_modules()] == names
        assert torch.equal(model(ids).logits, exact)
    ratio = [float((x - exact).norm() / exact.norm()) for x in (draft, both)]
    assert 0.001 < ratio[0] < ratio[1] < 0.5


def test_a_tied_head_drafts_with_weights_of_its_own_and_the_embedding_stays_exact():
    model = zoo.MODELS["llama"][1](zoo.MODELS["llama"][0](**zoo.ARCHITECTURE, tie_word_embeddings=True)).eval()
    table = model.get_input_embeddings().weight.detach()
    switch = int4.attach(model, "all")
    assert model.get_input_embeddings().weight is model.lm_head.exact.weight
    x = torch.randn(1, 2, 256)
    with torch.no_grad(), switch.drafting():
        drafted = model.lm_head(x)
    assert 0 < float((drafted - x @ table.T).norm()) < 0.2 * float((x @ table.T).norm())
    int4.detach(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, table)


def test_layers_with_4_bit_weights_of_their_own_are_shared_with_the_draft():
    model = zoo.fresh()
    for layer in model.model.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, int4.Int4Linear.rounded(child))
    own, count = int4.own_bytes(model), int4.own_parameters(model)
    assert count == sum(p.numel() for p in zoo.model().parameters())
    with pytest.raises(ModelError, match="already has 4-bit weights") as refusal:
        int4.attach(model, "ffn")
    assert "method.draft_weights=same" in str(refusal.value)
    int4.attach(model, "all")
    assert [name for name, m in model.named_modules() if isinstance(m, int4.DraftLinear)] == ["lm_head"]
    assert (int4.own_bytes(model), int4.own_parameters(model)) == (own, count)
    int4.detach(model)
    assert len(int4.own_layers(model)) == 14


def test_what_has_no_four_bit_form_is_said():
    with pytest.raises(ModelError, match="40 input and 48 output channels"):
        int4.Int4Linear.rounded(nn.Linear(40, 48))
    with pytest.raises(ModelError, match="decoder layers"):
        int4.attach(nn.Linear(32, 32), "ffn")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "group"), [(384, 128), (832, 64), (96, 32)])
def test_the_product_on_a_gpu_is_that_of_the_rounded_weights(dtype, columns, group):
    torch.manual_seed(0)
    linear = nn.Linear(columns, 64).to("cuda", dtype)
    layer = int4.Int4Linear.rounded(linear)
    codes, scales, zeros = round_weights(linear.weight, "layer", "")
    centred = codes.float().unflatten(-1, (-1, group)) - zeros.float()[..., None]
    weight = (centred * scales.float()[..., None]).flatten(-2)
    for count in (1, 5, 40):
        x = torch.randn(count, columns, device="cuda", dtype=dtype)
        expected = x.float() @ weight.T + linear.bias.float()
        error = (layer(x).float() - expected).norm() / expected.norm()
        assert layer(x).dtype == dtype and error < 1e-2
