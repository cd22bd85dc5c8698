"""llama.cpp behind the interface of a model, on a real file; skipped where it is not installed."""

import pytest
import torch
from kit import GREEDY

import specdec
from specdec import ModelDraft, PromptLookup, Sampling, speculative
from specdec.models import loading, weights

llama_cpp = pytest.importorskip("llama_cpp")
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"


@pytest.fixture(scope="module")
def model():
    try:
        return specdec.load("smollm2-135m", backend="llama.cpp", device="cpu")
    except weights.WeightsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def ids(model):
    model.drop_last(model.length)
    return model.tokenizer(TEXT)["input_ids"]


def tv(one, other):
    return (one.double().softmax(-1) - other.double().softmax(-1)).abs().sum(-1) / 2


def test_its_rows_are_near_those_of_the_same_weights_in_torch(model, ids, smollm2):
    smollm2.drop_last(smollm2.length)
    ours, theirs = model.logits(ids), smollm2.logits(ids)
    smollm2.drop_last(smollm2.length)
    assert ours.shape == theirs.shape == (len(ids), model.vocab_size) and ours.dtype == torch.float32
    assert tv(ours, theirs).median() < 0.05
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.8
    assert set(smollm2.eos) <= set(model.eos)


def test_the_cache_grows_and_rolls_back(model, ids):
    whole = model.logits(ids)
    assert model.length == len(ids)
    model.drop_last(len(ids))
    model.prefill(ids[:7])
    assert model.length == 7
    wrong = model.logits([5, 6, 7])
    model.drop_last(3)
    rest = model.logits(ids[7:])
    assert model.length == len(ids) and tv(rest, whole[7:]).max() < 0.05
    model.drop_last(len(ids) - 7)
    assert torch.equal(model.logits([5, 6, 7]), wrong)
    for n in (-1, model.length + 1):
        with pytest.raises(ValueError, match="cannot drop"):
            model.drop_last(n)


def test_a_row_depends_on_nothing_after_it(model, ids):
    model.prefill(ids)
    one = model.logits([500, 600, 700, 800])
    model.drop_last(4)
    other = model.logits([500, 600, 9000, 9001])
    assert torch.equal(one[:2], other[:2]) and not torch.equal(one[2], other[2])


def test_long_prompts_are_read_in_parts(model, ids):
    long = (ids * 100)[:1200]
    parts = model.logits(long)
    assert parts.shape == (1200, model.vocab_size)
    model.drop_last(1200)
    model.prefill(long[:-1])
    assert tv(model.logits(long[-1:]), parts[-1:]).max() < 0.05


def test_a_full_context_is_refused(model, ids):
    with pytest.raises(ValueError, match="do not fit its context"):
        model.prefill(ids * (model.max_context // len(ids) + 1))
    assert model.length == 0  # before any work


def test_a_twin_has_a_cache_of_its_own(model, ids):
    model.prefill(ids)
    twin = model.twin()
    assert twin.length == 0 and twin.vocab_size == model.vocab_size
    twin.logits(ids[:3])
    assert model.length == len(ids) and twin.length == 3


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
@pytest.mark.parametrize("draft", ["twin", "lookup", "torch"])
def test_it_decodes_as_target_with_any_draft(model, ids, smollm2, draft, sampling):
    drafter = {"twin": lambda: ModelDraft(model), "lookup": PromptLookup, "torch": lambda: ModelDraft(smollm2)}[draft]()
    out = speculative(model, drafter, ids, 3, 20, sampling, seed=1)
    assert len(out.tokens) == 20
    if draft == "twin":
        assert sum(r.accepted for r in out.rounds) >= 12  # rows differ only by the shape of their pass
    assert speculative(model, drafter, ids, 3, 20, sampling, seed=1).tokens == out.tokens


def test_it_drafts_for_torch_without_loss(model, ids, smollm2):
    alone = specdec.autoregressive(smollm2, ids, 20, GREEDY)
    assert speculative(smollm2, ModelDraft(model), ids, 3, 20, GREEDY).tokens == alone.tokens


@pytest.fixture
def requantised(model, tmp_path, monkeypatch):
    """The model with every matrix in Q4_0, made in a cache folder of its own."""
    (tmp_path / model.path.name).symlink_to(model.path)
    (tmp_path / "converted").symlink_to(weights.cache_dir() / "converted")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    return specdec.load("smollm2-135m", backend="llama.cpp", device="cpu", weights="q4_0")


def test_every_matrix_can_be_q4_0_and_draft_without_loss(requantised, ids, smollm2):
    import gguf

    tensors = gguf.GGUFReader(requantised.path).tensors
    assert {t.tensor_type.name for t in tensors if len(t.shape) == 2} == {"Q4_0"}
    smollm2.drop_last(smollm2.length)
    far = tv(requantised.logits(ids), smollm2.logits(ids))
    smollm2.drop_last(smollm2.length)
    assert 0 < far.median() < 0.5  # another model, and a like one
    alone = specdec.autoregressive(smollm2, ids, 20, GREEDY)
    out = speculative(smollm2, ModelDraft(requantised), ids, 3, 20, GREEDY)
    assert out.tokens == alone.tokens and sum(r.accepted for r in out.rounds) > 5


def test_a_requantised_file_is_made_once_and_again_where_it_was_damaged(requantised, capfd):
    capfd.readouterr()
    made = requantised.path.read_bytes()
    assert weights.requantised("smollm2-135m") == requantised.path
    assert "re-quantising" not in capfd.readouterr().err
    requantised.path.write_bytes(made[:-1] + bytes([made[-1] ^ 1]))
    assert weights.requantised("smollm2-135m").read_bytes() == made
    said = capfd.readouterr().err
    assert "not as they were made" in said and "re-quantising" in said


def test_what_cannot_be_requantised_is_refused(tmp_path):
    from specdec.models.llama_cpp_model import requantise

    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="cannot make"):
        requantise(tmp_path / "model.gguf", tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device": "abacus"}, "device='abacus'"),
        ({"weights": "int8"}, "weights='int8'"),
        ({"name": "a/b"}, "none of them"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        loading.load(**{"name": "smollm2-135m", "backend": "llama.cpp"} | arguments)


def test_a_file_that_is_none_is_refused(tmp_path):
    from specdec.models.llama_cpp_model import LlamaCppModel

    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="cannot read"):
        LlamaCppModel(tmp_path / "model.gguf")
