"""Does speculation pay on this machine? Some two minutes instead of a study: ``python -m specdec.study.advise``.

What a pass costs is measured, and how often drafts are kept on three prompts; the cost model says what follows. The
study measures the speedup itself, on more prompts: this is a forecast.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from specdec import costmodel
from specdec.study import configurations, pairs
from specdec.study.configurations import Configuration, LookupSource, ModelSource

REPEATS = 5
K_MAX = 8
TOKENS = 40  # of every answer
PROMPTS = {domain: 1 for domain in configurations.DOMAINS}
RESAMPLES = 200
LEVEL = 0.90


@dataclass(frozen=True)
class Forecast:
    """What to expect of one configuration, greedy.

    c and v as in ``specdec.costmodel``, v at n = k + 1; k: the best draft length, 0 if no draft pays; speedup predicted
    there, low and high over resampled rounds; tokens_per_second predicted there, and of the target alone.
    """

    name: str
    c: float
    v: float
    k: int
    speedup: float
    low: float
    high: float
    tokens_per_second: float
    alone: float


def candidates(target: str | None, draft: str | None) -> dict[str, Configuration]:
    """The configurations to look at, by name: the study's on this machine's best device, or a pair of the user's own.

    Raises:
        ValueError: a draft without a target.
    """
    import torch

    if draft and not target:
        raise ValueError("DRAFT needs a TARGET: a draft is good or bad for one target")
    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if not target:
        found = configurations.study().configurations
        return {
            name: found[name]
            for name in configurations.study().profiles["quick"]
            if found[name].device == kind and found[name].dtype != "float32" and not pairs.unavailable(found[name])
        }
    place = {"device": kind, "dtype": "float16" if kind == "mps" else "bfloat16", "target": target}
    sources = {"prompt lookup": LookupSource(kind="prompt-lookup", max_ngram=3)}
    if draft:
        sources |= {
            f"{draft}, {form}": ModelSource(kind="model", weights=draft, format=form) for form in ("dense", "int8")
        }
    made = {name: Configuration(title=name, draft=source, **place) for name, source in sources.items()}
    return {name: one for name, one in made.items() if not pairs.unavailable(one)}


@dataclass(frozen=True)
class Alone:
    """A target by itself: its greedy answer to each prompt, and what these took.

    v by n, the seconds of a round, and how much of it is not the pass but the draw, in passes.
    """

    model: object
    work: list[list[int]]
    answers: list[list[int]]
    v: dict[int, float]
    seconds: float
    draw: float


def alone(configuration: Configuration) -> Alone:
    """Measure a target: passes of n tokens, and a short answer to each prompt."""
    import specdec
    from specdec import latency

    target = pairs.load_target(configuration)
    work = [pairs.prompt_ids(target.tokenizer, prompt.text) for _, prompt in configurations.prompts(PROMPTS)]
    costs = latency.measure_costs(target, None, work[0], K_MAX, REPEATS)
    greedy = specdec.Sampling(temperature=0)
    written = [specdec.autoregressive(target, ids, TOKENS, greedy) for ids in work]
    seconds, passes = np.array([(r.seconds, r.verify_seconds) for out in written for r in out.rounds]).T
    answers = [out.tokens for out in written]
    return Alone(target, work, answers, costs.v, np.median(seconds), np.median(seconds / passes) - 1)


def replayed(draft, target: Alone) -> np.ndarray:
    """Rounds of up to ``K_MAX`` greedy draft tokens, (rounds, 2): how many are drafted, how many accepted.

    At temperature 0 the target keeps a draft token where it would have written the same one, and its answer shows what
    it writes: no pass of the target is needed. Rounds that the end of an answer cuts are left out.

    Raises:
        ValueError: no answer has room for a round.
    """
    import torch

    import specdec
    from specdec.drafts import common_prefix

    greedy, generator, rounds = specdec.Sampling(temperature=0), torch.Generator(), []
    for ids, answer in zip(target.work, target.answers, strict=True):
        if hasattr(draft, "start"):
            draft.start(ids[:-1], target.model)
        at = 0
        while at + K_MAX < len(answer):
            drafted = draft.propose([*ids, *answer[:at]], K_MAX, greedy, generator)[0].tolist()
            accepted = common_prefix(drafted, answer[at:])
            rounds.append((len(drafted), accepted))
            at += accepted + 1
    if not rounds:
        raise ValueError(f"the target's context has no room for a prompt and {K_MAX + 1} tokens")
    return np.array(rounds)


def forecast(name: str, configuration: Configuration, target: Alone) -> Forecast:
    """Measure what ``configuration`` adds to its target: a pass of the draft, and which of its tokens are kept."""
    from specdec import latency

    draft = pairs.load_draft(configuration, target.model)
    c = latency.measure_costs(target.model, draft, target.work[0], 0, 3 * REPEATS).c
    drafted, accepted = replayed(draft, target).T
    n, v = zip(*target.v.items(), strict=True)
    cost = costmodel.Costs(
        c=c + target.draw if c else 0.0,  # a model's draft token is drawn as the target's one token is
        # prompt lookup may draft fewer than K
        v={k + 1: float(np.interp(np.minimum(drafted, k) + 1, n, v).mean()) for k in range(1, K_MAX + 1)},
    )

    def survival(accepted):
        return (accepted[:, None] > np.arange(K_MAX)).mean(axis=0)

    k, speedup = costmodel.best_k(survival(accepted), cost.c, cost.v)
    rng = np.random.default_rng(0)
    drawn = [speedup_at(k, survival(rng.choice(accepted, len(accepted))), cost) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Forecast(
        name, cost.c, cost.v.get(k + 1, 1.0), k, speedup, low, high, speedup / target.seconds, 1 / target.seconds
    )


def speedup_at(k: int, survival, cost: costmodel.Costs) -> float:
    """The predicted speedup at one K; 1 without drafts."""
    return costmodel.speedup(survival[:k], cost.c, cost.v[k + 1]) if k else 1.0


def advice(found: list[Forecast]) -> str:
    """A table and what it comes to."""
    lines = [
        f"{'':32s} {'c':>5s} {'v(K+1)':>7s} {'best K':>7s} {'speedup expected':>22s} {'tokens/s':>9s} {'alone':>6s}"
    ]
    for one in sorted(found, key=lambda f: -f.tokens_per_second):
        interval = f"{one.speedup:.2f} ({one.low:.2f} to {one.high:.2f})" if one.k else "none pays"
        lines.append(
            f"{one.name:32s} {one.c:5.2f} {one.v:7.2f} {one.k:7d} {interval:>22s} {one.tokens_per_second:9.1f} {one.alone:6.1f}"
        )
    best = max(found, key=lambda f: f.tokens_per_second)
    if best.k == 0:
        verdict = "Speculation does not pay here: the target alone is the fastest."
    elif best.low <= 1:
        verdict = f"Speculation may pay here: {best.name} at K = {best.k}, but the interval holds 1."
    else:
        verdict = (
            f"Speculation pays here: {best.name} at K = {best.k}, about {best.speedup:.2f} times the target alone."
        )
    note = (
        f"Greedy, {sum(PROMPTS.values())} prompts of {TOKENS} tokens, one of each domain: a forecast. Intervals ({LEVEL:.0%}) are over rounds, not prompts. "
        "Tokens of targets in other forms are those of other models: the chapter on equivalence says how far they are. "
        "`make study` measures the speedup itself."
    )
    return "\n".join([*lines, "", verdict, note])


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 with the reason on stderr where the pair cannot be used."""
    parser = argparse.ArgumentParser(prog="advise", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", help="a name of data/weights.yml, a folder, or a hub repository; default: the study's"
    )
    parser.add_argument("--draft", help="the same, for the draft model")
    options = parser.parse_args(arguments)
    try:
        chosen = candidates(options.target, options.draft)
        found, measured = [], None
        # Candidates of one target follow each other: it is loaded and measured once.
        in_turn = sorted(chosen.items(), key=lambda item: item[1].target_key())
        for i, (name, configuration) in enumerate(in_turn, start=1):
            if configuration.target_key() != measured:
                print(f"advise: the target of {name} alone", file=sys.stderr, flush=True)
                target, measured = None, configuration.target_key()  # the last one's memory is free first
                target = alone(configuration)
            print(f"advise: {name}, {i} of {len(chosen)}", file=sys.stderr, flush=True)
            found.append(forecast(name, configuration, target))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"advise: {error}", file=sys.stderr)
        return 1
    print(advice(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
