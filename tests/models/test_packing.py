"""Packed layers: the layer they stand for, row by row, and a whole model made of them."""

import copy

import pytest
import torch
from kit import tiny, words
from torch import nn

import specdec
from specdec import TorchModel
from specdec.drafts import first_layers
from specdec.models import loading, packing
from specdec.study import configurations, pairs

PREFIX = torch.randint(3, 97, (20,), generator=torch.Generator().manual_seed(0)).tolist()
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 4, 5, 6, 9, 40]

needs_int8 = pytest.mark.skipif(packing.int8_missing() is not None, reason=str(packing.int8_missing()))
KINDS = [packing.PackedLinear, packing.UpcastLinear, pytest.param(packing.Int8Linear, marks=needs_int8)]


def layer(dtype, bias=True, size=(96, 200)):
    torch.manual_seed(1)
    return nn.Linear(*size, bias=bias).to(dtype).requires_grad_(False)


def packable(dtype):
    if packing.dense_layer(dtype) is not packing.PackedLinear:
        pytest.skip(f"torch packs no {dtype} on this machine")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_is_the_layer(dtype, bias):
    packable(dtype)
    dense = layer(dtype, bias)
    packed = packing.PackedLinear(dense)
    for n in ROWS:
        x = torch.randn(1, n, 96).to(dtype)
        torch.testing.assert_close(packed(x), dense(x))
    assert packed(torch.randn(0, 96).to(dtype)).shape == (0, 200)


@pytest.mark.parametrize("bias", [True, False])
def test_an_upcast_layer_is_the_layer(bias):
    dense = layer(torch.bfloat16, bias, size=(96, 3 * packing._PIECE + 7))
    upcast = packing.UpcastLinear(dense)
    assert upcast.weight is dense.weight
    for n in ROWS:
        x = torch.randn(1, n, 96).bfloat16()
        torch.testing.assert_close(upcast(x), dense(x))
    assert upcast(torch.randn(0, 96).bfloat16()).shape == (0, 3 * packing._PIECE + 7)


@pytest.mark.parametrize("instructions", [True, False])
def test_bfloat16_without_instructions_is_up_cast(monkeypatch, tmp_path, instructions):
    if not packing._X86:
        pytest.skip("torch's own layers are used here")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: instructions)
    expected = packing.PackedLinear if instructions else packing.UpcastLinear
    assert packing.dense_layer(torch.bfloat16) is expected
    assert packing.dense_layer(torch.float32) is packing.PackedLinear
    assert packing.dense_layer(torch.float16) is None
    if not instructions:
        saved(tmp_path, tie_word_embeddings=True)
        model = specdec.load(tmp_path, device="cpu", dtype="bfloat16")
        assert {type(m) for m in model.model.modules() if hasattr(m, "in_features")} == {packing.UpcastLinear}
        assert model.model.lm_head.weight is model.model.get_input_embeddings().weight
        dense = TorchModel(tiny(0, tie_word_embeddings=True).bfloat16())
        torch.testing.assert_close(model.logits(PREFIX), dense.logits(PREFIX), atol=0.05, rtol=0.05)
        assert pairs.weight_bytes(model) == pairs.weight_bytes(dense)


@needs_int8
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_int8_layer_rounds_weights_by_output_and_activations_by_token(dtype, bias):
    dense = layer(dtype, bias)
    int8 = packing.Int8Linear(dense)
    weight = dense.weight.float()
    step = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / step).round() * step
    for n in ROWS:
        x = torch.randn(1, n, 96).to(dtype) * torch.logspace(-3, 3, n)[:, None].to(dtype)
        scale = x.float().abs().amax(-1, keepdim=True) / int8.levels
        expected = (x.float() / scale).round() * scale @ rounded.T + (dense.bias.float() if bias else 0)
        # A weight half way between two steps may go to either; quantising itself costs ten times as much.
        assert ((int8(x).float() - expected).norm(dim=-1) < 4e-3 * expected.norm(dim=-1)).all()
        assert int8(x).dtype == dtype


@needs_int8
def test_extreme_weights_and_activations_do_not_overflow():
    dense = layer(torch.float32, bias=False)
    dense.weight.fill_(1.0)  # every product has the largest value that 8 bits can take
    torch.testing.assert_close(packing.Int8Linear(dense)(torch.ones(2, 96)), torch.full((2, 200), 96.0))


@needs_int8
def test_zeros_are_zero_and_what_is_not_finite_is_not_hidden():
    int8 = packing.Int8Linear(layer(torch.float32, bias=False))
    assert (int8(torch.zeros(2, 96)) == 0).all()
    for value in (float("nan"), float("inf")):
        x = torch.ones(2, 96)
        x[1, 3] = value
        out = int8(x)
        assert out[0].isfinite().all() and not out[1].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_nothing_else_in_the_block(kind, dtype):
    if kind is packing.PackedLinear:
        packable(dtype)
    if kind is packing.UpcastLinear and dtype != torch.bfloat16:
        pytest.skip("for bfloat16 only")
    packed = kind(layer(dtype))
    x = torch.randn(9, 96).to(dtype)
    other = x.clone()
    other[5:] *= 1000
    assert torch.equal(packed(x)[:5], packed(other)[:5])


def saved(path, **settings):
    """A tiny model with its tokenizer, in transformers' layout."""
    hf = tiny(0, **settings)
    hf.save_pretrained(path)
    words([f"w{i}" for i in range(97)], eos_token="w9").save_pretrained(path)
    return hf


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_is_packed_and_says_the_same(tmp_path, dtype, tied):
    packable(loading._DTYPES[dtype])
    hf = saved(tmp_path, tie_word_embeddings=tied)
    model = specdec.load(tmp_path, device="cpu", dtype=dtype)
    kinds = {type(m) for m in model.model.modules() if hasattr(m, "in_features")}
    assert kinds == {packing.PackedLinear}
    dense = TorchModel(copy.deepcopy(hf).to(model.model.dtype))
    exact = TorchModel(hf).logits(PREFIX)
    packed, plain = ((m.logits(PREFIX) - exact).norm() / exact.norm() for m in (model, dense))
    assert packed < 1.5 * plain + 1e-6  # the dtype's own rounding
    assert model.vocab_size == dense.vocab_size
    weights = sum(m.weight.nbytes for m in dense.model.modules() if isinstance(m, nn.Linear))
    norms = sum(p.nbytes for name, p in dense.model.named_parameters() if "norm" in name)
    assert pairs.weight_bytes(model) == pairs.weight_bytes(dense) == weights + norms


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_model_is_near_and_its_rows_depend_on_nothing_after_them(tmp_path, dtype):
    hf = saved(tmp_path)
    model = specdec.load(tmp_path, device="cpu", dtype=dtype, weights="int8")
    near = TorchModel(hf).logits(PREFIX)
    levels = model.model.lm_head.levels  # 63 on a CPU without VNNI
    assert (model.logits(PREFIX) - near).norm() < 0.05 * 127 / levels * near.norm()
    model.drop_last(10)
    one = model.logits([5, 6, 7, 8, 9])
    model.drop_last(5)
    other = model.logits([5, 6, 90, 91, 92])
    assert torch.equal(one[:2], other[:2]) and not torch.equal(one[2], other[2])
    head = 97 * 32
    rest = sum(m.weight.numel() for m in hf.model.modules() if isinstance(m, nn.Linear))
    norms = sum(p.numel() for name, p in hf.named_parameters() if "norm" in name) * model.model.dtype.itemsize
    assert pairs.weight_bytes(model) == head + rest + norms


@needs_int8
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_torchs_own_int8_would_fail_that_test(tmp_path):
    """Why there is a layer of our own: one scale for the whole block lets a row see what comes after it."""
    model = tiny(0)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    one, other = (quantised(input_ids=torch.tensor([[5, 6, *rest]])).logits[0, :2] for rest in ([7, 8], [90, 91]))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("weights", ["dense", pytest.param("int8", marks=needs_int8)])
def test_first_layers_of_a_packed_model_share_its_weights(tmp_path, weights):
    saved(tmp_path)
    model = specdec.load(tmp_path, device="cpu", dtype="float32", weights=weights)
    before = model.logits(PREFIX)
    draft = first_layers(model, 1)
    assert len(draft.model.model.layers) == 1 and len(model.model.model.layers) == 2
    assert draft.model.lm_head is model.model.lm_head
    assert draft.model.model.layers[0].mlp.up_proj is model.model.model.layers[0].mlp.up_proj
    assert not torch.equal(draft.logits(PREFIX), before)
    model.drop_last(20)
    assert torch.equal(model.logits(PREFIX), before)


def test_int8_is_for_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "_device", lambda name: torch.device("mps"))
    with pytest.raises(ValueError, match="run on a CPU, not on mps"):
        loading.load("huge", weights="int8")
    monkeypatch.undo()
    monkeypatch.setattr(packing, "int8_missing", lambda device: "no 8-bit kernels")
    with pytest.raises(ValueError, match="no 8-bit kernels"):
        loading.load("huge", device="cpu", weights="int8")


def test_a_configuration_loads_each_model_in_its_form(monkeypatch):
    loads = []
    monkeypatch.setattr(specdec, "load", lambda name, **form: loads.append((name, form)) or TorchModel(tiny(0)))
    monkeypatch.setattr(loading, "llama_cpp_missing", lambda device: "no llama.cpp")
    monkeypatch.setattr(packing, "int8_missing", lambda device: "no kernels")
    place = {"device": "cpu", "dtype": "bfloat16"}
    dense, int8 = ({"weights": form} | place for form in ("dense", "int8"))
    gguf, q4_0 = ({"backend": "llama.cpp", "weights": form} | place for form in ("dense", "q4_0"))
    declared = configurations.study().configurations
    for name, target, draft, missing in (
        ("cpu-bf16", dense, dense, None),
        ("int8-draft", dense, int8, "no kernels"),
        ("int8-both", int8, int8, "no kernels"),
        ("int8-target", int8, dense, "no kernels"),
        ("gguf-draft", dense, gguf, "no llama.cpp"),
        ("gguf-q4", gguf, gguf, "no llama.cpp"),
        ("q4-int8", int8, q4_0, "no kernels"),
    ):
        loads.clear()
        pairs.build(declared[name])
        pairs.dense_target(declared[name])
        again = [] if target is dense else [("qwen2.5-coder-1.5b", dense)]
        assert loads == [("qwen2.5-coder-1.5b", target), ("qwen2.5-coder-0.5b", draft), *again]
        assert pairs.unavailable(declared[name]) == missing


def test_what_cannot_be_packed_stays_as_it_is(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(packing, "dense_layer", lambda dtype: None)
    model = specdec.load(tmp_path, device="cpu", dtype="float32")
    assert any(type(m) is nn.Linear for m in model.model.modules())
