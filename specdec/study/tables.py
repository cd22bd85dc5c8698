"""From records to the quantities of the book, once for all chapters. Words and symbols as in the method chapter."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
from scipy import stats

from specdec import costmodel
from specdec.study.records import RESULTS

LEVEL = 0.95  # of every interval of a mean
MEDIAN_LEVEL = 0.90  # of every interval of a median: five repeats give no more, from their smallest to their largest
FEW = 8  # prompts; a point that rests on fewer is called indicative


def runs(machine: str) -> dict[str, dict]:
    """``run.json`` of every configuration that ``machine`` has finished, by name."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted((RESULTS / machine).glob("*/run.json"))}


def skipped(machine: str) -> dict[str, str]:
    """Configurations that could not run on ``machine``, with the reason."""
    path = RESULTS / machine / "skipped.json"
    return json.loads(path.read_text()) if path.exists() else {}


def records(machine: str, name: str) -> pd.DataFrame:
    """One record file of all configurations of ``machine``, with a column ``configuration``; empty if there is none."""
    found = []
    for path in sorted((RESULTS / machine).glob(f"*/{name}.csv")):
        found.append(pd.read_csv(path).assign(configuration=path.parent.name))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=["configuration"])


def median_interval(values) -> pd.Series:
    """Median with its distribution-free interval (order statistics); no interval where too few values give none."""
    values = np.asarray(values, dtype=float)
    interval = stats.quantile_test(values, q=np.median(values), p=0.5).confidence_interval(MEDIAN_LEVEL)
    return pd.Series({"median": np.median(values), "low": interval.low, "high": interval.high, "n": len(values)})


def forward_costs(machine: str) -> pd.DataFrame:
    """Seconds t(n) of a forward pass and the verification cost v(n) = t(n) / t(1), by configuration, model and n.

    v is the median over repeats of the ratio within one repeat, so that a slow spell of the machine cancels.
    Columns: median, low, high (t, seconds), v, v_low, v_high, n_repeats.
    """
    data = records(machine, "latency")
    if data.empty:
        return pd.DataFrame(columns=["configuration", "model", "n", "median", "low", "high", "v", "v_low", "v_high"])
    keys = ["configuration", "model"]
    one = data[data.n == 1].set_index([*keys, "repeat"]).seconds.rename("one")
    data = data.join(one, on=[*keys, "repeat"])
    data["ratio"] = data.seconds / data.one
    rows = []
    for key, cell in data.groupby([*keys, "n"], sort=True):
        t, v = median_interval(cell.seconds), median_interval(cell.ratio)
        rows.append(
            dict(zip([*keys, "n"], key, strict=True))
            | {"median": t["median"], "low": t.low, "high": t.high}
            | {"v": v["median"], "v_low": v.low, "v_high": v.high, "n_repeats": int(t.n)}
        )
    return pd.DataFrame(rows)


def latency_ratios(machine: str) -> pd.DataFrame:
    """c = t_draft(1) / t_target(1), median over repeats of the ratio within one repeat; configurations with a draft model."""
    data = records(machine, "latency")
    rows = []
    for name, cell in data.groupby("configuration"):
        one = cell[cell.n == 1].pivot(index="repeat", columns="model", values="seconds")
        if "draft" in one:
            rows.append({"configuration": name, **median_interval(one.draft / one.target)})
    return pd.DataFrame(rows, columns=["configuration", "median", "low", "high", "n"])


def memory(machine: str) -> pd.DataFrame:
    """How far t(1) is from the memory floor: bytes of weights read, read rate, floor and t(1), by configuration and model."""
    rates, costs = records(machine, "bandwidth"), forward_costs(machine)
    rows = []
    for name, run in runs(machine).items():
        if "latency" not in run["steps"]:
            continue
        rate = rates[rates.configuration == name].bytes_per_second.median()
        for model, size in run["steps"]["latency"]["weight_bytes"].items():
            t1 = costs[(costs.configuration == name) & (costs.model == model) & (costs.n == 1)]["median"].iloc[0]
            rows.append(
                {
                    "configuration": name,
                    "model": model,
                    "bytes": size,
                    "bytes_per_second": rate,
                    "floor": size / rate,
                    "t1": t1,
                }
            )
    return pd.DataFrame(rows)


def speedups(machine: str) -> pd.DataFrame:
    """Speedup over target-only decoding, paired by prompt: geometric mean with a t interval on the log ratios.

    Columns: configuration, temperature, domain ("all" over the domains), k, speedup, low, high, prompts,
    tokens_per_second, baseline_tokens_per_second (medians over prompts). Intervals are missing for one prompt.
    """
    answers = records(machine, "answers")
    if answers.empty:
        return pd.DataFrame(
            columns=["configuration", "temperature", "domain", "k", "speedup", "low", "high", "prompts"]
        )
    answers["per_token"] = answers.seconds / answers.tokens
    keys = ["configuration", "temperature", "domain", "prompt"]
    alone = answers[answers.k == 0].set_index(keys).per_token.rename("alone")
    paired = answers[answers.k > 0].join(alone, on=keys)
    paired["log_ratio"] = np.log(paired.alone / paired.per_token)
    paired = pd.concat([paired, paired.assign(domain="all")])
    rows = []
    for key, cell in paired.groupby(["configuration", "temperature", "domain", "k"], sort=True):
        mean, n = cell.log_ratio.mean(), len(cell)
        half = stats.t.ppf((1 + LEVEL) / 2, n - 1) * cell.log_ratio.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
        rows.append(
            dict(zip(["configuration", "temperature", "domain", "k"], key, strict=True))
            | {"speedup": np.exp(mean), "low": np.exp(mean - half), "high": np.exp(mean + half), "prompts": n}
            | {
                "tokens_per_second": (1 / cell.per_token).median(),
                "baseline_tokens_per_second": (1 / cell.alone).median(),
            }
        )
    return pd.DataFrame(rows)


def survival(rounds: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """S_i = P(at least i accepted) and a_i = S_i / S_(i-1), with the number of rounds at risk.

    Counted are rounds in which all K were asked for and which the end of the answer did not cut. S_i has all of them at
    risk, a_i those that accepted at least i - 1. Intervals are Wilson's for independent rounds; rounds of one answer are
    not quite independent, so they are a little narrow.

    Args:
        rounds: round records; by: columns that make a group, K (``k``) among them.

    Returns:
        A row for each group and i = 1..K: survival, low, high, rounds, conditional, conditional_low, conditional_high,
        at_risk.
    """
    counted = rounds[(rounds.k > 0) & (rounds.asked == rounds.k) & ~rounds.ended]
    rows = []
    for key, cell in counted.groupby(by, sort=True):
        at_risk = len(cell)
        for i in range(1, int(cell.k.iloc[0]) + 1):
            kept = int((cell.accepted >= i).sum())
            s, a = _proportion(kept, len(cell)), _proportion(kept, at_risk)
            rows.append(
                dict(zip(by, key, strict=True))
                | {"i": i, "survival": s[0], "low": s[1], "high": s[2], "rounds": len(cell)}
                | {"conditional": a[0], "conditional_low": a[1], "conditional_high": a[2], "at_risk": at_risk}
            )
            at_risk = kept
    return pd.DataFrame(rows)


def acceptance(rounds: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Tokens per target pass tau, draft acceptance (accepted / drafted) and tested acceptance (accepted / tested).

    A draft token is tested unless one before it in its round was rejected. Rounds as for :func:`survival`.
    """
    counted = rounds[(rounds.k > 0) & (rounds.asked == rounds.k) & ~rounds.ended]

    def one(cell):
        tested = (cell.accepted + (cell.accepted < cell.drafted)).sum()
        return pd.Series(
            {
                "tau": 1 + cell.accepted.mean(),
                "draft_acceptance": cell.accepted.sum() / cell.drafted.sum() if cell.drafted.sum() else np.nan,
                "tested_acceptance": cell.accepted.sum() / tested if tested else np.nan,
                "drafted_per_round": cell.drafted.mean(),
                "rounds": len(cell),
            }
        )

    return counted.groupby(by, sort=True)[list(counted.columns)].apply(one).reset_index()


def predictions(machine: str) -> pd.DataFrame:
    """Predicted beside measured speedup, for every configuration, temperature, domain and K.

    (1 + sum S_i) / (K c + v + o). S from the rounds; v from the latency records, v(K + 1), or its mean over the rounds
    where a draft proposes fewer than K; c is measured in place: seconds
    of proposing one draft token over seconds of one target-only round; o likewise: what a round spends outside forwards
    and drafting, over the same.
    """
    rounds, costs, measured = records(machine, "rounds"), forward_costs(machine), speedups(machine)
    if rounds.empty:
        return measured.assign(predicted=[])
    rounds = pd.concat([rounds, rounds.assign(domain="all")])
    keys = ["configuration", "temperature", "domain"]
    alone = rounds[rounds.k == 0].groupby(keys).seconds.median()
    curves = survival(rounds, [*keys, "k"]).set_index([*keys, "k"]).survival
    rows = []
    for row in measured.itertuples():
        key = (row.configuration, row.temperature, row.domain)
        try:
            curve = curves.loc[(*key, row.k)].tolist()
        except KeyError:  # every round was shortened by the end of the answer
            continue
        cell = rounds[(rounds[keys] == list(key)).all(axis=1) & (rounds.k == row.k) & (rounds.asked == row.k)]
        v = costs[(costs.configuration == row.configuration) & (costs.model == "target")].set_index("n").v
        drafting = cell.draft_seconds.median() / alone[key]
        overhead = (cell.seconds - cell.draft_seconds - cell.verify_seconds).median() / alone[key]
        verification = float(np.interp(cell.drafted + 1, v.index, v).mean())  # prompt lookup may draft fewer than K
        rows.append(
            row._asdict()
            | {"c": drafting / row.k, "v": verification, "overhead": overhead, "tau": 1 + sum(curve)}
            | {"predicted": costmodel.speedup(curve, drafting / row.k, verification, overhead)}
        )
    return pd.DataFrame(rows).drop(columns="Index")


def best(table: pd.DataFrame, configuration: str, domain: str = "all", temperature: float = 0.0) -> pd.Series | None:
    """The row with the largest speedup of one configuration, domain and temperature; None if nothing was measured."""
    rows = table[(table.configuration == configuration) & (table.domain == domain) & (table.temperature == temperature)]
    return None if rows.empty else rows.loc[rows.speedup.idxmax()]


def greedy_agreement(machine: str) -> pd.DataFrame:
    """How many greedy answers equal the target-only one, by configuration and K; the widest top-2 gap at a divergence."""
    answers = records(machine, "answers")
    greedy = answers[(answers.temperature == 0) & (answers.k > 0)]
    return (
        greedy.groupby(["configuration", "k"])
        .agg(
            answers=("k", "size"),
            identical=("diverged_at", lambda at: int(at.isna().sum())),
            first_divergence=("diverged_at", "min"),
            widest_gap=("top_gap", "max"),
            top_logit=("top_logit", "max"),
        )
        .reset_index()
    )


def _proportion(kept, of):
    if of == 0:
        return np.nan, np.nan, np.nan
    interval = stats.binomtest(kept, of).proportion_ci(LEVEL, method="wilson")
    return kept / of, interval.low, interval.high
