import re

import pytest
import yaml

from specdec.models import weights
from specdec.study import configurations as conf


def test_every_profile_names_known_weights_and_enough_prompts():
    study = conf.study()
    assert set(study.profiles) == {"smoke", "quick", "standard", "full"}
    for plans in study.profiles.values():
        for name, plan in plans.items():
            assert set(study.configurations[name].weights()) <= set(weights.manifest())
            for step in plan.steps().values():
                if hasattr(step, "prompts"):
                    assert len(conf.prompts(step.prompts)) == sum(step.prompts.values())


def test_required_configurations_are_declared():
    named = "cpu-bf16 cpu-fp32 int8-draft int8-both int8-target gguf-q4 gguf-draft prompt-lookup mps-fp16 cuda-bf16 gguf-metal"
    named += " gguf-int8 q4-int8"
    assert set(named.split()) <= set(conf.study().configurations)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ks": (2, 4)}, "ks"),
        ({"ks": "(2, 4)"}, "ks: Input should be a valid list"),
        ({"ks": []}, "ks"),
        ({"ks": [0]}, "ks.0"),
        ({"adaptive": 0}, "adaptive"),
        ({"max_new_tokens": "12"}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"temperatures": [float("nan")]}, "temperatures"),
        ({"temperatures": [-1.0]}, "temperatures"),
        ({"prompts": {"poetry": 1}}, "prompts"),
        ({"tokens": 12}, "tokens: Extra inputs"),
    ],
)
def test_bad_parameters_are_named(change, message):
    good = {"prompts": {"code": 1}, "ks": [2], "adaptive": 2, "temperatures": [0.0], "max_new_tokens": 8, "seed": 0}
    conf.validated("decode", good)
    with pytest.raises(ValueError, match=re.escape(message)):
        conf.validated("decode", good | change)


def test_a_wrong_configuration_is_named(tmp_path):
    text = (conf.DATA / "configurations.yml").read_text()
    path = tmp_path / "configurations.yml"
    path.write_text(text.replace("device: cpu", "device: abacus", 1))
    with pytest.raises(ValueError, match="configurations.cpu-bf16.device"):
        conf.study(path)
    path.write_text(text.replace("  quick:\n    cpu-bf16:", "  quick:\n    cpu-bf17:", 1))
    with pytest.raises(ValueError, match="unknown configuration cpu-bf17"):
        conf.study(path)


def test_unknown_profile_and_configuration_are_named():
    with pytest.raises(ValueError, match="there are smoke, quick"):
        conf.plan("fast", "cpu-bf16")
    with pytest.raises(ValueError, match="does not measure 'smoke-layers'"):
        conf.plan("quick", "smoke-layers")


def test_prompts_are_ours_unique_and_many():
    seen = set()
    for domain in conf.DOMAINS:
        entries = yaml.safe_load((conf.DATA / "prompts" / f"{domain}.yml").read_text())
        assert len(entries) >= 24
        assert [e["id"] for e in entries] == [f"{domain}-{i:02d}" for i in range(1, len(entries) + 1)]
        seen |= {e["text"] for e in entries}
    assert len(seen) >= 72
    with pytest.raises(ValueError, match="prompts wanted of code"):
        conf.prompts({"code": 1000})


def test_domains_take_turns():
    assert [d for d, _ in conf.prompts({"code": 2, "conversation": 1})] == ["code", "conversation", "code"]


def test_seeds_differ():
    seeds = {conf.seed_of(1, "cpu-bf16", p, t, k) for p in range(50) for t in (0.0, 1.0) for k in range(9)}
    assert len(seeds) == 50 * 2 * 9
