"""``data/configurations.yml`` and the prompts as typed records; the parameters of every measuring notebook."""

from __future__ import annotations

import functools
import hashlib
import zlib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
DOMAINS = ("code", "conversation", "summarisation")

# What stands in the column ``k`` of records where it is no draft length:
ADAPTIVE = -1  # the draft length adapts
CONTROL = -2  # the target alone once more, to see what two measurements of one thing differ by

Count = Annotated[int, Field(ge=1)]
Domain = Literal["code", "conversation", "summarisation"]
Format = Literal["dense", "int8", "gguf", "q4_0"]  # run by llama.cpp: gguf, the file as it is; q4_0, re-quantised


class Record(BaseModel):
    """Nothing is converted (2 is not "2"), nothing unknown is passed over."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ModelSource(Record):
    """A draft model: a name of ``data/weights.yml``, and the form in which its weights are used (``specdec.load``)."""

    kind: Literal["model"]
    weights: str
    format: Format = "dense"


class LookupSource(Record):
    """Prompt lookup (``specdec.drafts.PromptLookup``)."""

    kind: Literal["prompt-lookup"]
    max_ngram: Count


class LayersSource(Record):
    """The target's own first layers (``specdec.drafts.first_layers``)."""

    kind: Literal["first-layers"]
    layers: Count


class ToySource(Record):
    """The toy models of ``specdec.study.toys``: their law is known, their speed says nothing."""

    kind: Literal["toy"]


class Configuration(Record):
    """A draft and a target on one device; ``dtype`` is that of dense weights and of all activations."""

    title: str
    device: Literal["cpu", "mps", "cuda"]
    dtype: Literal["bfloat16", "float16", "float32"]
    target: str
    format: Format = "dense"  # of the target's weights
    draft: Annotated[ModelSource | LookupSource | LayersSource | ToySource, Field(discriminator="kind")]

    def formats(self) -> set[str]:
        """The forms of weights it needs."""
        return {self.format, getattr(self.draft, "format", self.format)}

    def target_key(self) -> tuple[str, str, str, str]:
        """What two configurations share if and only if they have one and the same target."""
        return self.target, self.format, self.device, self.dtype

    def weights(self) -> list[str]:
        """Names of the weight files it needs, target first."""
        if self.draft.kind == "toy":
            return []
        return [self.target] + ([self.draft.weights] if self.draft.kind == "model" else [])


class Latency(Record):
    """Parameters of ``latency``: forward passes of n tokens (``lengths``) behind ``context`` cached ids."""

    lengths: Annotated[list[Count], Field(min_length=1)]
    context: Count
    repeats: Count
    gigabytes: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _has_one(self):
        if 1 not in self.lengths:
            raise ValueError("lengths must hold 1: the verification cost is relative to it")
        return self


class Decode(Record):
    """Parameters of ``decode``: target-only decoding and every K, on the first ``prompts`` of each domain.

    adaptive: the longest draft of one more arm, whose K adapts (``specdec.AdaptiveK``).
    """

    prompts: Annotated[dict[Domain, Count], Field(min_length=1)]
    ks: Annotated[list[Count], Field(min_length=1)]
    adaptive: Count
    temperatures: Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1)]
    max_new_tokens: Count
    seed: int


class Sample(Record):
    """Parameters of ``sample``: ``answers`` at T = 1 a prompt and arm, the speculative arm with draft length k.

    End tokens do not end an answer: the number of tokens is fixed before the run.
    """

    prompts: Annotated[dict[Domain, Count], Field(min_length=1)]
    answers: Annotated[int, Field(ge=2)]
    k: Count
    max_new_tokens: Count
    seed: int


class Rows(Record):
    """Parameters of ``rows``: one round behind the first ``start`` tokens of an answer, and the passes of the whole answer."""

    prompts: Annotated[dict[Domain, Count], Field(min_length=1)]
    k: Count
    start: Count
    max_new_tokens: Count
    draws: Annotated[int, Field(ge=1000)]
    seed: int

    @model_validator(mode="after")
    def _inside(self):
        if self.start > self.max_new_tokens:
            raise ValueError("start must lie within the answer: at most max_new_tokens")
        return self


class Repeats(Record):
    """Parameters of ``repeats``: so many arms (``batches``) of the target alone, drawn by transformers, each as large as one of ``sample``."""

    prompts: Annotated[dict[Domain, Count], Field(min_length=1)]
    answers: Annotated[int, Field(ge=2)]
    batches: Annotated[int, Field(ge=2)]
    max_new_tokens: Count
    seed: int


class Peers(Record):
    """Parameters of ``peers``: greedy answers of this and of other configurations (``beside``) with draft length k, and of other libraries."""

    beside: list[str]
    prompts: Annotated[dict[Domain, Count], Field(min_length=1)]
    k: Count
    max_new_tokens: Count
    seed: int


class Teeth(Record):
    """Parameters of ``teeth``: planted faults against every level, and the calibration of the tests.

    runs: answers of the toy; draws: of one step; answers: to each prompt and arm of the tests of whole answers; repeats:
    of every level but the certain ones; power_repeats: of the level that a fault rests on which no certain one sees.
    """

    runs: Count
    draws: Count
    answers: Count
    repeats: Count
    power_repeats: Count
    calibration_repeats: Count
    seed: int


STEPS = {
    "latency": Latency,
    "decode": Decode,
    "sample": Sample,
    "rows": Rows,
    "repeats": Repeats,
    "peers": Peers,
    "teeth": Teeth,
}


class Plan(Record):
    """What one profile measures of one configuration; a step left out is not measured."""

    latency: Latency | None = None
    decode: Decode | None = None
    sample: Sample | None = None
    rows: Rows | None = None
    repeats: Repeats | None = None
    peers: Peers | None = None
    teeth: Teeth | None = None

    @model_validator(mode="after")
    def _alike(self):
        same = ("prompts", "answers", "max_new_tokens")
        if self.repeats and (
            not self.sample or any(getattr(self.repeats, name) != getattr(self.sample, name) for name in same)
        ):
            raise ValueError("repeats must have the prompts, answers and max_new_tokens of sample")
        return self

    def steps(self) -> dict[str, Record]:
        """The steps that are measured, by name."""
        return {name: getattr(self, name) for name in STEPS if getattr(self, name) is not None}


class Study(Record):
    """The whole of ``data/configurations.yml``."""

    configurations: dict[str, Configuration]
    profiles: dict[str, dict[str, Plan]]

    @model_validator(mode="after")
    def _known(self):
        for profile, plans in self.profiles.items():
            for name in [*plans, *(other for plan in plans.values() if plan.peers for other in plan.peers.beside)]:
                if name not in self.configurations:
                    raise ValueError(f"profile {profile} names an unknown configuration {name}")
        return self


@functools.cache
def study(path: Path = DATA / "configurations.yml") -> Study:
    """The study, checked.

    Raises:
        ValueError: naming file, place and what is wrong there.
    """
    try:
        return Study.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ValueError(f"{path.name}: {_readable(error)}") from None


def with_page() -> list[str]:
    """Configurations that have a page of their own: those that are measured for publication, but the toy."""
    known = study()
    return [name for name in known.profiles["full"] if known.configurations[name].draft.kind != "toy"]


def plan(profile: str, configuration: str) -> Plan:
    """What ``profile`` measures of ``configuration``; ValueError naming what there is."""
    profiles = study().profiles
    if profile not in profiles:
        raise ValueError(f"unknown profile {profile!r}; there are {', '.join(profiles)}")
    if configuration not in profiles[profile]:
        raise ValueError(
            f"profile {profile!r} does not measure {configuration!r}; it has {', '.join(profiles[profile])}"
        )
    return profiles[profile][configuration]


def validated(step: str, parameters: dict) -> Record:
    """The typed record of one step's parameters; ValueError naming the field that is unknown or mistyped."""
    try:
        return STEPS[step].model_validate(parameters)
    except ValidationError as error:
        raise ValueError(f"parameters of {step}: {_readable(error)}") from None


class Prompt(Record):
    """One prompt: ``id`` is unique, ``text`` the user's turn."""

    id: str
    text: Annotated[str, Field(min_length=1)]


def prompts(wanted: dict[str, int]) -> list[tuple[str, Prompt]]:
    """The first n prompts of each domain, as (domain, prompt), domains taking turns.

    Taking turns lets a run that was stopped hold something of every domain.
    """
    files = {}
    for domain, count in wanted.items():
        entries = yaml.safe_load((DATA / "prompts" / f"{domain}.yml").read_text(encoding="utf-8"))
        if count > len(entries):
            raise ValueError(f"{count} prompts wanted of {domain}, {len(entries)} are there")
        files[domain] = [Prompt.model_validate(entry) for entry in entries[:count]]
    return [(d, files[d][i]) for i in range(max(wanted.values())) for d in files if i < len(files[d])]


def prompts_hash() -> str:
    """SHA-256 over all prompt files, for the run record."""
    digest = hashlib.sha256()
    for path in sorted((DATA / "prompts").glob("*.yml")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def seed_of(*parts) -> int:
    """A seed made from what identifies an answer, so that no two answers of a study share one."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def _readable(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'record'}: {e['msg']}" for e in error.errors())
