"""The peers beside the loops here, on tiny models; what needs another package is skipped where it is not installed."""

import pandas as pd
import psutil
import pytest
from kit import GREEDY, tiny

import specdec
from specdec import ModelDraft, TorchModel
from specdec.models import weights
from specdec.study import configurations, pairs, peers, tables

PROMPT = [5, 6, 7, 8]


def test_transformers_gives_the_same_greedy_tokens_with_and_without_an_assistant():
    model, assistant = tiny(0), tiny(0)
    expected = specdec.autoregressive(TorchModel(model), PROMPT, 24, GREEDY).tokens
    alone, assisted = peers.generating(model, assistant, 3)
    assert alone.decode(PROMPT, 24) == assisted.decode(PROMPT, 24) == expected
    assert (alone.k, assisted.k, assisted.baseline) == (0, 3, alone.name) and alone.library == assisted.library
    assert len(peers.generating(model, None, 3)) == 1


def test_assisted_generation_drafts_as_many_as_it_is_told(monkeypatch):
    model, assistant = tiny(0), tiny(0)
    asked, generate = [], type(assistant).generate

    def counted(self, *args, **kwargs):
        if self is assistant:
            asked.append(kwargs["max_new_tokens"])
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(assistant), "generate", counted)
    peers.generating(model, assistant, 3)[1].decode(PROMPT, 24)
    assert len(asked) > 3 and set(asked[:-1]) == {3}


def test_a_stray_generation_config_changes_nothing():
    model = tiny(0)
    expected = peers.generating(tiny(0), None, 3)[0].decode(PROMPT, 12)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.eos_token_id = expected[2]
    assert peers.generating(model, None, 3)[0].decode(PROMPT, 12) == expected


def test_configurations_with_one_target_share_it(monkeypatch):
    loads = []
    monkeypatch.setattr(pairs, "load_target", lambda one: loads.append(one.target) or TorchModel(tiny(0)))
    monkeypatch.setattr(pairs, "load_draft", lambda one, target: ModelDraft(TorchModel(tiny(1))))
    declared = configurations.study().configurations
    arms = peers.ours(
        {name: declared[name] for name in ("cpu-bf16", "int8-draft", "cpu-fp32")}, 3, {"cpu-bf16": PROMPT}
    )
    assert len(loads) == 2
    assert [(arm.name, arm.baseline, arm.k) for arm in arms] == [
        ("cpu-bf16, target alone", "cpu-bf16, target alone", 0),
        ("cpu-bf16", "cpu-bf16, target alone", 3),
        ("cpu-bf16, adaptive", "cpu-bf16, target alone", -1),
        ("int8-draft", "cpu-bf16, target alone", 3),
        ("cpu-fp32, target alone", "cpu-fp32, target alone", 0),
        ("cpu-fp32", "cpu-fp32, target alone", 3),
    ]
    assert len({tuple(arm.decode(PROMPT, 9)) for arm in arms}) == 1


@pytest.mark.parametrize(("maker", "package"), [("llama_cpp_python", "llama_cpp"), ("xllamacpp", "xllamacpp")])
def test_llama_cpp_decodes_as_it_is_told(maker, package):
    pytest.importorskip(package)
    one = configurations.study().configurations["smoke-layers"]
    try:
        weights.fetch(one.target)
    except weights.WeightsUnavailable as error:
        pytest.skip(str(error))
    threads = psutil.Process().num_threads()
    [arm] = getattr(peers, maker)(one, 3)
    ids = pairs.tokenizer(one)("def fibonacci(n):")["input_ids"]
    first = arm.decode(ids, 12)
    assert (len(first) == 12 or maker == "xllamacpp") and all(isinstance(token, int) for token in first)
    assert arm.decode(ids[:2], 12) != first and arm.decode(ids, 12) == first  # nothing is carried over
    if maker == "xllamacpp":  # no thread of another library slows down the arms here
        assert psutil.Process().num_threads() == threads


def test_what_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "ours", lambda chosen, k, adaptive: [])
    monkeypatch.setattr(peers, "transformers", lambda one, k: [])
    found, left = peers.arms(["cpu-bf16", "gguf-draft"], 3, PROMPT)
    assert found == [] and set(left) == {"gguf-draft", "llama_cpp_python", "xllamacpp"}
    assert all("make llama" in why for why in left.values())


def rows(arm, baseline, k, seconds, ids="1 2"):
    fixed = {"library": "x 1", "baseline": baseline, "k": k, "tokens": 10}
    return [
        {"domain": "code", "prompt": f"p{i}", "arm": arm, **fixed, "seconds": s, "ids": ids if i else "1 2"}
        for i, s in enumerate(seconds)
    ]


def test_arms_are_held_against_their_own_baseline_and_each_other():
    data = pd.DataFrame(
        rows("alone", "alone", 0, [1.0, 2.0])
        + rows("drafts", "alone", 3, [0.5, 1.0], ids="1 3")
        + rows("other", "other", 0, [2.0, 4.0])
    )
    table = tables.peers(data).query("domain == 'code'").set_index("arm")
    assert table.speedup.to_dict() == pytest.approx({"alone": 1, "drafts": 2, "other": 1})
    assert table.loc["drafts"].low == pytest.approx(2) and table.loc["drafts"].high == pytest.approx(2)
    assert table.loc["drafts"].identical == 1 and table.loc["alone"].identical == 2
    assert table.loc["other"].rate == pytest.approx((5 * 2.5) ** 0.5)
    ratio = tables.ahead(data, "drafts", "other", "code")
    assert (ratio.speedup, ratio.prompts) == (pytest.approx(4), 2)
