"""What a GPU does otherwise, with a stand-in for it: work that is not waited for, and passes replayed from a record."""

import itertools

import numpy as np
import pytest
import torch
from kit import G, noisy, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec import ModelDraft, PromptLookup, TorchModel, devices
from specdec.equivalence import one_sample_chi2
from specdec.models import loading
from specdec.models.static_model import LONGEST, StaticModel
from specdec.sampling import _first_to_ring

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Waiting(Exception):
    """The CPU asked for a value while a graph was recorded."""


class Record(TorchDispatchMode):
    """As a CUDA graph: keeps every operation with the tensors it used, and does the same again to the same tensors.

    No Python runs in a replay, so a number that Python worked out is the one of the recording for ever.
    """

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise Waiting
        out = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.steps:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def captured(run, device, what):
    run()  # as the warm-up does
    record = Record()
    with record:
        result = run()

    def replay():
        record.replay()
        return result

    return replay


@pytest.fixture
def gpu(monkeypatch):
    """The CPU taken for a GPU: the list that comes back tells passes ("pass") from values read ("wait"), in turn."""
    log = []
    monkeypatch.setattr(devices, "is_gpu", lambda device: True)
    monkeypatch.setattr(devices, "mark", lambda device: 0.0)
    monkeypatch.setattr(devices, "captured", captured)
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        kept = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, _kept=kept, **k: log.append("wait") or _kept(*a, **k))
    for kind in (TorchModel, StaticModel):
        kept = kind._forward
        monkeypatch.setattr(kind, "_forward", lambda *a, _kept=kept, **k: log.append("pass") or _kept(*a, **k))
    return log


def pair(kind=TorchModel):
    target = tiny(0)
    return kind(target), ModelDraft(kind(noisy(target)))


@pytest.mark.parametrize("kind", [TorchModel, StaticModel])
@pytest.mark.parametrize("options", [{}, {"T": 0}, {"rule": "block"}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_round_waits_once_after_its_last_pass(gpu, kind, options):
    target, draft = pair(kind)
    G(target, draft, PROMPT, 3, 8, **options)  # so that shapes are captured
    gpu.clear()
    _, out = G(target, draft, PROMPT, 3, 24, **options)
    runs = [(what, len(list(same))) for what, same in itertools.groupby(gpu)]
    passes = [count for what, count in runs if what == "pass"]
    # The prompt, read by draft and target, if a value is read after it.
    prompt = [2] if len(passes) == len(out.rounds) + 1 else []
    assert passes[len(prompt) :] == [r.drafted + 1 + (0 if prompt else 2 * (i == 0)) for i, r in enumerate(out.rounds)]


@pytest.mark.parametrize("kind", [TorchModel, StaticModel])
@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("options", [{}, {"rule": "block"}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}])
def test_the_tokens_are_those_of_the_cpu(request, kind, T, options):
    expected = [G(*pair(), PROMPT, k, 24, T=T, seed=k, **options)[0] for k in (0, 1, 4)]
    lookup = G(pair()[0], PromptLookup(), PROMPT * 3, 3, 16, T=T)[0]
    request.getfixturevalue("gpu")
    target, draft = pair(kind)
    assert [G(target, draft, PROMPT, k, 24, T=T, seed=k, **options)[0] for k in (0, 1, 4)] == expected
    assert G(target, PromptLookup(), PROMPT * 3, 3, 16, T=T)[0] == lookup


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("bad", ["target", "draft"])
def test_bad_logits_are_found_when_the_round_is_read(gpu, value, T, bad):
    class Bad(TorchModel):
        def _forward(self, ids, rows):
            start, logits = self.length, super()._forward(ids, rows).clone()
            if start <= 9 < start + len(ids):  # the row behind ids 0..9 tells of position 10
                logits[9 - start] = value
            return logits

    made = {name: (Bad if name == bad else TorchModel)(tiny(0), name=name) for name in ("target", "draft")}
    with pytest.raises(FloatingPointError, match=f"{bad} model {bad}: .* position 10 "):
        G(made["target"], ModelDraft(made["draft"]), PROMPT, 3, 20, T=T)


@pytest.mark.parametrize("capture", [captured, lambda run, device, what: run])
def test_a_static_model_gives_the_rows_of_its_model(monkeypatch, capture):
    """Short and long passes, whole and partial rollbacks, and a second model on the same weights."""
    monkeypatch.setattr(devices, "captured", capture)
    hf = tiny(0, window=256)
    static, plain = StaticModel(hf), TorchModel(hf)
    twin = static.twin()
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.choice([1, 1, 2, 4, 5, LONGEST, LONGEST + 1, 40]))
        back = int(rng.integers(static.length + 1)) if rng.random() < 0.5 or static.length + n > 250 else 0
        ids = rng.integers(3, 97, n).tolist()
        for model in (static, plain):
            model.drop_last(back)
        if static.length + n > 250:
            continue
        if rng.random() < 0.2:
            static.prefill(ids)
            plain.prefill(ids)
        else:
            torch.testing.assert_close(static.logits(ids), plain.logits(ids), atol=1e-4, rtol=1e-4)
        assert static.length == plain.length and twin.length == 0
    torch.testing.assert_close(twin.logits(PROMPT), fresh_logits(hf), atol=1e-4, rtol=1e-4)


def fresh_logits(hf):
    return hf(input_ids=torch.tensor([PROMPT])).logits[0].detach()


def test_a_replay_runs_no_python(monkeypatch):
    monkeypatch.setattr(devices, "captured", captured)
    hf, calls = tiny(0), []
    hf.register_forward_pre_hook(lambda *_: calls.append(1))
    model = StaticModel(hf)
    model.prefill(PROMPT)
    shapes = len(calls)
    for n in (1, 4, 1, 4, 1):
        model.logits(PROMPT[:n])
    assert len(calls) == shapes + 2 * 2  # two shapes, each warmed up and recorded


def test_what_waits_cannot_be_recorded():
    """The stand-in refuses what a GPU would refuse, so that the tests above say something."""
    place = torch.zeros(2)
    with pytest.raises(Waiting):
        captured(lambda: torch.zeros(2) if place[0] > 0 else place, torch.device("cpu"), "")


def test_what_is_behind_the_mask_counts_for_nothing_after_a_reset():
    model = StaticModel(tiny(0))
    model.prefill(PROMPT)
    with torch.inference_mode():
        for layer in model._cache.layers:
            layer.values.fill_(float("nan"))
    model.drop_last(8)
    torch.testing.assert_close(model.logits(PROMPT), fresh_logits(model.model), atol=1e-4, rtol=1e-4)


def test_a_static_model_says_what_it_cannot_do():
    hf = tiny(0, window=64)
    with pytest.raises(ValueError, match="62 \\+ 3 ids do not fit its context of 64"):
        model = StaticModel(hf)
        model.prefill([5] * 62)
        model.logits([5, 6, 7])
    with pytest.raises(ValueError, match="cannot drop 63"):
        model.drop_last(63)
    assert StaticModel(hf, max_context=32).max_context == 32
    hf.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="no passes of fixed shape: sliding_attention"):
        StaticModel(hf)
    hf.config.layer_types, hf.config.rope_parameters = None, {"rope_type": "dynamic"}
    with pytest.raises(ValueError, match="no passes of fixed shape: rope dynamic"):
        StaticModel(hf)


def test_a_model_on_cuda_is_static_where_it_can_be():
    hf = tiny(0)
    assert type(loading._wrapped(hf, None, "here")) is TorchModel
    places = type("Placed", (type(hf),), {"device": torch.device("cuda")})
    hf.__class__ = places
    assert type(loading._wrapped(hf, None, "there")) is StaticModel
    hf.config.layer_types = ["sliding_attention", "full_attention"]
    assert type(loading._wrapped(hf, None, "there")) is TorchModel


class Cuda:
    """The calls of ``torch.cuda`` that recording makes, in turn."""

    def __init__(self, fails=False):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        def call(*_, **__):
            self.calls.append(name)
            if name == "graph" and self.fails:
                raise RuntimeError("operation not permitted")
            return self

        return call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_recording_warms_up_apart_and_replays(monkeypatch):
    cuda, runs = Cuda(), []
    monkeypatch.setattr(torch, "cuda", cuda)
    replay = devices.captured(lambda: runs.append(1) or len(runs), torch.device("cuda"), "a pass")
    assert cuda.calls.index("device") < cuda.calls.index("stream") < cuda.calls.index("graph")
    assert (replay(), replay(), len(runs), cuda.calls.count("replay")) == (3, 3, 3, 2)


def test_what_cannot_be_recorded_is_launched(monkeypatch):
    monkeypatch.setattr(torch, "cuda", Cuda(fails=True))
    with pytest.warns(UserWarning, match="a pass cannot be recorded .* operation not permitted"):
        run = devices.captured(lambda: "rows", torch.device("cuda"), "a pass")
    assert run() == "rows"


def test_other_devices_have_no_graphs():
    def run():
        return "rows"

    assert devices.captured(run, torch.device("cpu"), "") is run is devices.captured(run, torch.device("mps"), "")


def test_draws_without_float64_follow_the_law():
    law = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.25, 0.04, 0.01, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = np.bincount([int(_first_to_ring(law, generator)) for _ in range(20_000)], minlength=8)
    assert one_sample_chi2(counts, law.numpy()).pvalue > 1e-3
    one = torch.nn.functional.one_hot(torch.tensor(3), 8).float()
    assert all(int(_first_to_ring(one, generator)) == 3 for _ in range(20))
