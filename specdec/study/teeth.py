"""Have the tests teeth? Faults planted in the shipped source, and every level of testing turned on each of them.

A fault is a change of text to one module; :func:`code` makes the package with that change. A level looks at such code
and gives an error (certain: nothing is left to chance) or p-values. The levels run on toy models whose law is known
(``specdec.study.toys``). Beside them, how often each test rejects a true null: :func:`calibration`.

Torch is loaded when code is made: what reads the records needs none.
"""

from __future__ import annotations

import functools
import importlib
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import optimize

from specdec import Sampling, equivalence
from specdec.study import toys
from specdec.study.configurations import Teeth, seed_of
from specdec.study.rows import recorded

LEVEL = 0.01  # a test detects where p <= LEVEL
PERMUTATIONS = 199
MODULES = ("verification", "drafts", "decoding")


# Faults


@dataclass(frozen=True)
class Fault:
    """In ``module`` the text ``old``, which occurs once, becomes ``new``; no module: the shipped source.

    level: the cheapest one that must see it; rule, top_k: how the answers are made; top_k 0 filters nothing.
    """

    name: str
    level: str = ""
    module: str = ""
    old: str = ""
    new: str = ""
    rule: str = "token"
    top_k: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(top_k=self.top_k)


_RESIDUAL = "torch.where(total > 0, excess / total, p)"
_STOP = "stop = torch.cat([one, keep.cumprod(0)]) * torch.cat([1 - keep, one])"
_NEXT = "residual(p[:-1], q, weight), p[-1:]]"
_REACH = "(reach[-1] * ratio).clamp(max=1)"
_ACCEPTED = "accepted = draw(stop, generator)"
_DRAW = "ids[i] = draw(q[i], generator)"
_TARGET_BACK = "target.drop_last(target.length - (len(context) - 1))"
_DRAFT_BACK = "self.model.drop_last(len(self._cached) - shared)"

CONTROLS = (
    Fault("none"),
    Fault("none, block rule", rule="block"),
    Fault("none, top-k filter", top_k=4),
)
FAULTS = (
    Fault("residual through softmax", "exact law", "verification", _RESIDUAL, "excess.softmax(-1)"),
    Fault("p instead of the residual", "exact law", "verification", _RESIDUAL, "p"),
    Fault(
        "u fixed at 0: every draft token accepted",
        "exact law",
        "verification",
        "keep = _ratio(p, q, drafted).clamp(max=1)",
        "keep = torch.ones_like(p[:-1, 0])",
    ),
    Fault(
        "accepted counted past the first rejection",
        "exact law",
        "verification",
        _STOP,
        "stop = one\n"
        "        for a in keep:\n"
        "            stop = torch.cat([stop * (1 - a), one * 0]) + torch.cat([one * 0, stop * a])",
    ),
    Fault(
        "bonus token from the row before",
        "exact law",
        "verification",
        _NEXT,
        "residual(p[:-1], q, weight), p[-2:][:1]]",  # K = 0 has one row only
    ),
    Fault("replacement from the next row", "exact law", "verification", _NEXT, "residual(p[1:], q, weight), p[-1:]]"),
    Fault(
        "5 % lenience",
        "exact law",
        "verification",
        "keep = _ratio(p, q, drafted).clamp(max=1)",
        "keep = (1.05 * _ratio(p, q, drafted)).clamp(max=1)",
    ),
    Fault(
        "block rule: residual without its weight",
        "exact law",
        "verification",
        "(weight * p - q)",
        "(p - q)",
        rule="block",
    ),
    Fault("block rule: never capped", "exact law", "verification", _REACH, "(reach[-1] * ratio)", rule="block"),
    Fault(
        "block rule: each position for itself", "exact law", "verification", _REACH, "ratio.clamp(max=1)", rule="block"
    ),
    Fault(
        "block rule: stop without excess",
        "exact law",
        "verification",
        "slack = excess + (1 - weight[:, 0])",
        "slack = excess + 1",
        rule="block",
    ),
    Fault(
        "every draft token accepted, whatever was drawn",
        "greedy",
        "verification",
        _ACCEPTED,
        "accepted = torch.tensor(len(drafted))",
    ),
    Fault(
        "bonus row whatever was kept",
        "greedy",
        "verification",
        "following[accepted[None]]",
        "following[-1:]",
    ),
    Fault(
        "one uniform for both draws",
        "one step",
        "verification",
        _ACCEPTED,
        f"state = generator.get_state()\n    {_ACCEPTED}\n    generator.set_state(state)",
    ),
    Fault(
        "q before the filters",
        "cache",
        "drafts",
        _DRAW,
        f"{_DRAW}; q[i] = Sampling().probabilities(logits[:, : self._limit])",
        top_k=4,
    ),
    Fault("greedy draft with a soft q", "likelihood z", "drafts", _DRAW, "ids[i] = q[i].argmax()"),
    Fault(
        "draft rolled back one too many",
        "cache",
        "drafts",
        _DRAFT_BACK,
        "self.model.drop_last(min(self.model.length, len(self._cached) - shared + 1))",
    ),
    Fault(
        "draft rolled back one too few",
        "cache",
        "drafts",
        _DRAFT_BACK,
        "self.model.drop_last(max(0, len(self._cached) - shared - 1))",
    ),
    Fault("draft never rolled back", "cache", "drafts", _DRAFT_BACK, "pass"),
    Fault(
        "target rolled back one too many",
        "cache",
        "decoding",
        _TARGET_BACK,
        "target.drop_last(target.length - (len(context) - 2))",
    ),
    Fault(
        "target rolled back one too few",
        "cache",
        "decoding",
        _TARGET_BACK,
        "target.drop_last(max(0, target.length - len(context)))",
    ),
    Fault("target never rolled back", "cache", "decoding", _TARGET_BACK, "pass"),
)


def planted(name: str, old: str = "", new: str = "") -> types.ModuleType:
    """A copy of the module ``name`` from its shipped source, with ``old`` replaced by ``new``.

    Raises:
        ValueError: ``old`` does not occur exactly once; the patch no longer applies.
    """
    shipped = importlib.import_module(name)  # a dataclass looks its module up by name
    source = Path(shipped.__file__).read_text(encoding="utf-8")
    if old:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} occurs {source.count(old)} times in {name}: the patch no longer applies")
        source = source.replace(old, new)
    module = types.ModuleType(name)
    exec(compile(source, f"{name} with a planted fault", "exec"), module.__dict__)  # noqa: S102
    return module


@dataclass(frozen=True)
class Code:
    """The modules that decode, with ``fault`` in one of them."""

    fault: Fault
    verification: types.ModuleType
    drafts: types.ModuleType
    decoding: types.ModuleType


@functools.cache
def code(fault: Fault) -> Code:
    """The package with ``fault``: the loop calls the changed ``verify``."""
    made = {
        name: planted(f"specdec.{name}", *((fault.old, fault.new) if name == fault.module else ())) for name in MODULES
    }
    made["decoding"].verify = made["verification"].verify  # it was bound to the shipped one by name
    return Code(fault, **made)


# Levels: each looks once at code, repeat by repeat with seeds of its own

TOY_K, TOY_START = 2, (1, 2)
TOY = toys.random_law(0, 8, order=2)
TOY_DRAFT = toys.near(TOY, 1, 1.0)
STEP_K = 3
STEP_P = np.stack([TOY[i, i + 1] for i in range(STEP_K + 1)])  # rows at one frozen prefix
STEP_Q = np.stack([TOY_DRAFT[i, i + 1] for i in range(STEP_K)])
ANSWERS_K, ANSWERS_LENGTH = 4, 60
TOPICS = toys.topics(toys.random_law(2, 16, order=2), 0.2)
TOPICS_DRAFT = toys.near(TOPICS, 3, 1.0)
ANSWERS_PROMPTS = ((0, 1), (3, 12), (9, 5), (14, 2), (7, 8))
TINY_PROMPTS = ([5, 6, 7], [60, 2, 33, 8])
TINY_K, TINY_LENGTH = 3, 40


def exact_law(made: Code, parameters: Teeth, repeat: int) -> dict[str, float]:
    """Every draft and every outcome of ``law`` summed in float64: the largest error of the joint law."""
    tables = [(toys.rows(n, 3, 4), toys.rows(n + 100, 3, 3)) for n in range(5)]
    return {"exact law": max(toys.exact(made.verification.law, *pair, made.fault.rule)[0] for pair in tables)}


def cache(made: Code, parameters: Teeth, repeat: int) -> dict[str, float]:
    """Rows of the target and laws of the draft, over rounds of every length, against passes without a cache.

    The largest difference: logits of the target, probabilities of the draft; inf where a row is missing.
    """
    from specdec import TorchModel

    hf, other = _tiny_pair()
    target = recorded(TorchModel(hf))
    draft = toys.watched(made.drafts.ModelDraft)(TorchModel(other))
    errors = []
    for prompt in TINY_PROMPTS:
        target.blocks.clear()
        tokens = made.decoding.speculative(
            target, draft, prompt, TINY_K, TINY_LENGTH, made.fault.sampling, rule=made.fault.rule
        ).tokens
        errors.append(toys.rows_error(target, prompt, tokens))
    return {"cache": max(*errors, draft.error)}


def greedy(made: Code, parameters: Teeth, repeat: int) -> dict[str, float]:
    """How many greedy answers in float32 differ from target-only decoding by the shipped loop."""
    from specdec import TorchModel

    hf, other = _tiny_pair()
    target, draft = TorchModel(hf), made.drafts.ModelDraft(TorchModel(other))
    found = [
        made.decoding.speculative(target, draft, p, TINY_K, TINY_LENGTH, Sampling(0), rule=made.fault.rule).tokens
        for p in TINY_PROMPTS
    ]
    return {"greedy": sum(a != b for a, b in zip(found, _greedy_reference(), strict=True))}


def one_step(made: Code, parameters: Teeth, repeat: int) -> dict[str, float]:
    """Fixed rows p and q, drafts drawn from q by numpy, many draws of ``verify``: :func:`step_pvalue`."""
    import torch

    rng = _rng(parameters, made.fault.name, "one step", repeat)
    drafted = _from_rows(STEP_Q, parameters.draws, rng)
    generator = torch.Generator().manual_seed(int(rng.integers(2**32)))
    p, q = torch.as_tensor(STEP_P).float(), torch.as_tensor(STEP_Q).float()
    with torch.inference_mode():
        outcomes = [made.verification.verify(p, q, d, generator, made.fault.rule) for d in torch.as_tensor(drafted)]
    return {"one step": step_pvalue(drafted, *np.array(outcomes).T, made.fault.rule, rng)}


def toy(made: Code, parameters: Teeth, repeat: int) -> dict[str, float]:
    """Independent answers of a toy whose law depends on what its cache holds: :func:`pairs_pvalue`."""
    import torch

    target, draft = toys.Table(TOY), made.drafts.ModelDraft(toys.Table(TOY_DRAFT))
    fault = made.fault
    seeds = _rng(parameters, fault.name, "toy", repeat).integers(2**32, size=parameters.runs).tolist()
    with torch.inference_mode():
        found = [
            made.decoding.speculative(
                target, draft, TOY_START, TOY_K, TOY_K + 2, fault.sampling, own, rule=fault.rule
            ).tokens
            for own in seeds
        ]
    return {"toy": pairs_pvalue(np.array(found), _filtered(TOY, fault.top_k))}


def answers(made: Code, parameters: Teeth, repeat: int) -> dict[str, float]:
    """Answers that stick to a topic, several to each of several prompts, beside as many drawn from the law by numpy.

    Scored by ``specdec.score``.
    """
    import torch

    from specdec import decoding

    target, draft = toys.Table(TOPICS), made.drafts.ModelDraft(toys.Table(TOPICS_DRAFT))
    fault, rng = made.fault, _rng(parameters, made.fault.name, "answers", repeat)
    starts = np.repeat(ANSWERS_PROMPTS, parameters.answers, axis=0)
    found, scores = [], []
    with torch.inference_mode():
        for ids, own in zip(starts.tolist(), rng.integers(2**32, size=len(starts)).tolist(), strict=True):
            tokens = made.decoding.speculative(
                target, draft, ids, ANSWERS_K, ANSWERS_LENGTH, fault.sampling, own, rule=fault.rule
            ).tokens
            found.append(tokens)
            scores += [vars(s) for s in decoding.score(target, ids, tokens, fault.sampling)]
    other = toys.walks(_filtered(TOPICS, fault.top_k), starts, ANSWERS_LENGTH, rng)
    return compared(np.array(found), other, pd.DataFrame(scores), parameters.answers, rng)


@dataclass(frozen=True)
class Level:
    """One way to look at code, which may give several levels of the matrix.

    bound: the error above which a certain level detects; None where it gives p-values. modules: what it runs of
    ``MODULES``; size: what it looks at in one repeat.
    """

    names: tuple[str, ...]
    look: Callable[[Code, Teeth, int], dict[str, float]]
    modules: tuple[str, ...]
    size: Callable[[Teeth], int]
    bound: float | None = None

    def repeats(self, fault: Fault, parameters: Teeth) -> int:
        if self.bound is not None:
            return 1
        return parameters.power_repeats if fault.level in self.names else parameters.repeats


LEVELS = (
    Level(("exact law",), exact_law, ("verification",), lambda parameters: 5, bound=1e-12),
    Level(("cache",), cache, MODULES, lambda parameters: len(TINY_PROMPTS) * TINY_LENGTH, bound=1e-3),
    Level(("greedy",), greedy, MODULES, lambda parameters: len(TINY_PROMPTS) * TINY_LENGTH, bound=0),
    Level(("one step",), one_step, ("verification",), lambda parameters: parameters.draws),
    Level(("toy",), toy, MODULES, lambda parameters: parameters.runs),
    Level(
        ("pooled chi-squared", "permutation", "PIT by rank", "likelihood z"),
        answers,
        MODULES,
        lambda parameters: len(ANSWERS_PROMPTS) * parameters.answers * ANSWERS_LENGTH,
    ),
)
NAMES = tuple(name for level in LEVELS for name in level.names)


def units() -> list[tuple[Fault, Level]]:
    """What a study measures, in order: every level on every fault whose module it runs."""
    return [
        (fault, level)
        for fault in (*CONTROLS, *FAULTS)
        for level in LEVELS
        if not fault.module or fault.module in level.modules
    ]


def detection(fault: Fault, level: Level, parameters: Teeth) -> list[dict]:
    """Rows of ``detection.csv``: how often ``level`` detects ``fault``."""
    made, repeats = code(fault), level.repeats(fault, parameters)
    found = pd.DataFrame([level.look(made, parameters, repeat) for repeat in range(repeats)])
    certain = level.bound is not None
    seen = found > level.bound if certain else found <= LEVEL
    return [
        {
            "fault": fault.name,
            "module": fault.module,
            "level": name,
            "size": level.size(parameters),
            "repeats": repeats,
            "detected": int(seen[name].sum()),
            "certain": certain,
            "largest_p": None if certain else float(found[name].max()),
        }
        for name in level.names
    ]


def cost(parameters: Teeth) -> float:
    """Seconds that the whole study will take, from one look of each level at the shipped source."""
    made = code(CONTROLS[0])
    once = {}
    for level in LEVELS:
        level.look(made, parameters, 0)  # models are made, torch is warm
        begin = time.perf_counter()
        level.look(made, parameters, 0)
        once[level.names] = time.perf_counter() - begin
    seconds = sum(once[level.names] * level.repeats(fault, parameters) for fault, level in units())
    for name, dependence in nulls():
        begin = time.perf_counter()
        calibration(name, dependence, parameters.model_copy(update={"calibration_repeats": 5}))
        seconds += (time.perf_counter() - begin) / 5 * parameters.calibration_repeats
    return seconds


# What the levels test


def step_pvalue(drafted, accepted, following, rule: str, rng: np.random.Generator) -> float:
    """Does the token at each of the K + 1 positions follow p? One-sample chi-squared, Holm's smallest over positions.

    Token rule: position i counts where the i tokens before it were kept; given that, its law is p_i. Under the block
    rule that holds for whole blocks only, so positions that were not reached are drawn from p here.

    Args:
        drafted: (n, K); accepted: (n,); following: (n,).
    """
    tokens = np.column_stack([drafted, following])
    tokens[np.arange(len(tokens)), accepted] = following
    reached = np.arange(tokens.shape[1]) <= accepted[:, None]
    if rule == "block":
        tokens = np.where(reached, tokens, _from_rows(STEP_P, len(tokens), rng))
        reached = np.full_like(reached, True)
    pvalues = [
        equivalence.one_sample_chi2(np.bincount(column[there], minlength=len(row)), row).pvalue
        for column, there, row in zip(tokens.T, reached.T, STEP_P, strict=True)
        if there.any()
    ]
    return float(equivalence.holm(pvalues).min())


def pairs_pvalue(tokens: np.ndarray, law: np.ndarray) -> float:
    """Joint counts of tokens (i, i + 1) against the law of order 2: chi-squared, Holm's smallest over i.

    Args:
        tokens: (n, length) of independent answers after ``TOY_START``.
    """
    size, laws = len(law), toys.pair_laws(law, TOY_START, tokens.shape[1] - 1)
    pvalues = [
        equivalence.one_sample_chi2(
            np.bincount(tokens[:, i] * size + tokens[:, i + 1], minlength=size**2), joint.ravel()
        ).pvalue
        for i, joint in enumerate(laws)
    ]
    return float(equivalence.holm(pvalues).min())


def compared(
    tokens: np.ndarray, other: np.ndarray, scores: pd.DataFrame, count: int, rng: np.random.Generator
) -> dict[str, float]:
    """p-values of the four tests of whole answers.

    Args:
        tokens, other: (prompts * count, length), the answers of the two arms, those to one prompt together.
        scores: those of ``tokens``, with the columns of ``specdec.score``.
    """
    answer, length = np.arange(len(tokens)), tokens.shape[1]
    table = pd.DataFrame(
        {
            "arm": np.repeat(["speculative", "target-only"], tokens.size),
            "prompt": np.tile((answer // count).repeat(length), 2),
            "answer": np.tile((answer % count).repeat(length), 2),
            "token": np.concatenate([tokens.ravel(), other.ravel()]),
        }
    )
    size = table.token.max() + 1
    counts = [np.bincount(arm.ravel(), minlength=size) for arm in (tokens, other)]
    seed = int(rng.integers(2**32))
    return {
        "pooled chi-squared": equivalence.two_sample_chi2(*counts).pvalue,
        "permutation": equivalence.permutation_test(table, permutations=PERMUTATIONS, seed=seed).pvalue,
        "PIT by rank": float(equivalence.uniformity(equivalence.pit(scores, seed=seed)).pvalue),
        "likelihood z": equivalence.likelihood_z(scores).pvalue,
    }


# Calibration: how often a test rejects where there is nothing to find

DEPENDENCE = {"independent": 0.0, "sticky": 0.5, "very sticky": 0.9}
NULL_SIZE = 50
NULL_LEVELS = (0.01, 0.05)
TOST = "TOST at the margin"  # declares equivalence although the difference is as large as the margin


def nulls() -> list[tuple[str, str]]:
    """(test, dependence) of every calibration; "answers" stands for the tests of whole answers."""
    return [("one step", "independent"), ("toy", "independent"), *(("answers", name) for name in DEPENDENCE)]


def calibration(name: str, dependence: str, parameters: Teeth) -> list[dict]:
    """Rows of ``calibration.csv``: rejections of a true null at each of ``NULL_LEVELS``, simulated without the loop."""
    rng = _rng(parameters, "null", name, dependence)
    once = {"one step": _null_step, "toy": _null_toy, "answers": _null_answers}[name]
    found = pd.DataFrame([once(rng, dependence, parameters) for _ in range(parameters.calibration_repeats)])
    return [
        {
            "test": test,
            "dependence": dependence,
            "repeats": len(found),
            "level": level,
            "rejected": int((found[test] <= level).sum()),
        }
        for test in found
        for level in NULL_LEVELS
    ]


def _null_step(rng, dependence, parameters):
    """The token rule once more, by numpy."""
    drafted = _from_rows(STEP_Q, parameters.draws, rng)
    at = np.arange(STEP_K)
    keep = rng.random(drafted.shape) < STEP_P[at, drafted] / STEP_Q[at, drafted]
    accepted = keep.cumprod(1).sum(1)
    excess = np.maximum(STEP_P[:-1] - STEP_Q, 0)
    replacements = _from_rows(np.vstack([excess / excess.sum(-1, keepdims=True), STEP_P[-1:]]), parameters.draws, rng)
    following = replacements[np.arange(len(drafted)), accepted]
    return {"one step": step_pvalue(drafted, accepted, following, "token", rng)}


def _null_toy(rng, dependence, parameters):
    tokens = toys.walks(TOY, np.tile(TOY_START, (parameters.runs, 1)), TOY_K + 2, rng)
    return {"toy": pairs_pvalue(tokens, TOY)}


def _null_answers(rng, dependence, parameters):
    law = toys.sticky(NULL_SIZE, DEPENDENCE[dependence])
    start = np.repeat(np.arange(len(ANSWERS_PROMPTS)), parameters.answers)[:, None]
    tokens, other = (toys.walks(law, start, ANSWERS_LENGTH, rng) for _ in range(2))
    colder, margin = _edge(dependence, parameters.answers)
    edge = toys.walks(colder, start, ANSWERS_LENGTH, rng)
    found = compared(tokens, other, _scored(law, start, tokens), parameters.answers, rng)
    return found | {TOST: equivalence.tost(_scored(law, start, edge), margin).pvalue}


@functools.cache
def _edge(dependence, count):
    """A colder law whose mean of log p + H is the margin, three standard errors of ``count`` answers a prompt."""
    law = toys.sticky(NULL_SIZE, DEPENDENCE[dependence])
    logs = np.log(law, where=law > 0, out=np.zeros_like(law))
    entropy = -(law * logs).sum(-1)
    start = np.bincount(np.arange(len(ANSWERS_PROMPTS)), minlength=NULL_SIZE) / len(ANSWERS_PROMPTS)

    def mean(values, walk):  # of values (V,) at the prefixes of an answer
        state, total = start, 0.0
        for _ in range(ANSWERS_LENGTH):
            total, state = total + state @ values, state @ walk
        return total / ANSWERS_LENGTH

    variance = mean((law * (logs + entropy[:, None]) ** 2).sum(-1), law)
    margin = 3 * float(np.sqrt(variance / (count * len(ANSWERS_PROMPTS) * ANSWERS_LENGTH)))

    def excess(temperature):
        colder = toys.heated(law, temperature)
        return mean((colder * (logs + entropy[:, None])).sum(-1), colder) - margin

    return toys.heated(law, optimize.brentq(excess, 0.2, 1)), margin


# Helpers


def _rng(parameters, *parts):
    return np.random.default_rng(seed_of(parameters.seed, *parts))


def _filtered(law, top_k):
    return toys.top(law, top_k) if top_k else law


def _from_rows(rows, count, rng):
    """(count, len(rows)) tokens, column i from row i."""
    cumulative = rows.cumsum(-1)
    cumulative[:, -1] = 1
    return np.column_stack([np.searchsorted(row, rng.random(count), side="right") for row in cumulative])


def _scored(law, start, tokens):
    return toys.scored(law, tokens, np.hstack([start, tokens[:, :-1]]))


@functools.cache
def _tiny_pair():
    hf = toys.tiny(0, window=512)
    return hf, toys.noisy(hf, 0.03)


@functools.cache
def _greedy_reference():
    import specdec

    target = specdec.TorchModel(_tiny_pair()[0])
    return [specdec.autoregressive(target, p, TINY_LENGTH, Sampling(0)).tokens for p in TINY_PROMPTS]
