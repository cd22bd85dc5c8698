"""From records to the quantities of the book, once for all chapters. Words and symbols as in the method chapter."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
from scipy import stats

from specdec import costmodel, equivalence
from specdec.study.configurations import ADAPTIVE, CONTROL
from specdec.study.records import RESULTS

LEVEL = 0.95  # of every interval of a mean
MEDIAN_LEVEL = 0.90  # of every interval of a median: five repeats give no more, from their smallest to their largest
FEW = 8  # prompts; a point that rests on fewer is called indicative
HALF = 3  # prompts, the fewest from which one half is predicted and on which the other is judged

# Fixed whatever the records say: the arms that are compared, the level of the family, the margin of equivalence.
PAIRS = (("speculative", "target-only"), ("speculative", "transformers"), ("target-only", "transformers"))
ALPHA = 0.05  # of Holm's correction over the family
MARGIN = 0.045  # nat a token, of the two one-sided tests: some three standard errors of 9,200 tokens of the main pair
POWER = 0.8  # from which a test is said to be strong enough
SEEN = 0.99  # detection rate from which a planted fault counts as seen
LAW_ERROR = 1e-6  # of one step over the whole vocabulary: above float32 rounding, far below any fault of the rule
ROW_ERROR = 1e-2  # of a float32 logit: above rounding, far below a cache that is off by one


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
        rows.append(
            dict(zip(["configuration", "temperature", "domain", "k"], key, strict=True))
            | dict(zip(["speedup", "low", "high"], _ratio(cell.log_ratio), strict=True))
            | {"prompts": len(cell)}
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

    The prediction is :func:`account`'s, from the rounds of the same prompts. Columns: those of :func:`speedups` and of
    the account.
    """
    rounds, measured = records(machine, "rounds"), speedups(machine)
    if rounds.empty:
        return measured.assign(predicted=[])
    costs = verification_costs(machine)
    rounds = pd.concat([rounds, rounds.assign(domain="all")])
    parts = {key: _by_prompt(cell) for key, cell in rounds.groupby(_CELL)}
    rows = []
    for row in measured.itertuples(index=False):
        cell = parts[row.configuration, row.temperature, row.domain]
        prompts = sorted({prompt for prompt, _ in cell})
        found = account([cell[p, row.k] for p in prompts], [cell[p, 0] for p in prompts], costs[row.configuration])
        if found:
            rows.append(row._asdict() | found)
    return pd.DataFrame(rows)


_CELL = ["configuration", "temperature", "domain"]


def verification_costs(machine: str) -> dict[str, pd.Series]:
    """v(n) of every configuration's target, by n."""
    costs = forward_costs(machine)
    return {name: cell.set_index("n").v for name, cell in costs[costs.model == "target"].groupby("configuration")}


_ACCOUNTED = ("k", "asked", "drafted", "accepted", "ended", "draft_seconds", "verify_seconds", "seconds")


def _by_prompt(rounds: pd.DataFrame) -> dict:
    """(prompt, K) -> its rounds as arrays, and ``tau``, the tokens that an uncut round of it gives (NaN: there is none)."""
    found = {}
    for (prompt, k), cell in rounds.groupby(["prompt", "k"]):
        part = found[prompt, k] = {name: cell[name].to_numpy() for name in _ACCOUNTED}
        accepted = part["accepted"][(part["asked"] == k) & ~part["ended"]]
        curve = (accepted[:, None] > np.arange(k)).mean(axis=0) if len(accepted) else None
        part["tau"] = np.nan if curve is None else costmodel.expected_tokens(curve)
    return found


def account(rounds: list[dict], alone: list[dict], v: pd.Series) -> dict[str, float] | None:
    """What a round of one K costs and gives, and the speedup that follows: (1 + sum S_i) / (K c + v + o).

    S comes from the rounds of each prompt, and tokens and prediction are geometric means over prompts, as a measured
    speedup is; v from the latency records, v(K + 1), or its mean over the rounds where a draft proposes fewer than K; c is
    measured in place: seconds of proposing one draft token over seconds of one target-only round; o likewise: what a
    round spends outside forwards and drafting, over the same.

    Args:
        rounds: of one K > 0, for each prompt what ``_by_prompt`` makes of it; alone: of K = 0; v: by n.

    Returns:
        c, v, overhead, cost (of a round), tau, predicted; None where every round was shortened by the end of its answer.
    """
    tau = stats.gmean([part["tau"] for part in rounds], nan_policy="omit")
    if np.isnan(tau):
        return None
    whole = {name: np.concatenate([part[name] for part in rounds]) for name in _ACCOUNTED}
    k = int(whole["k"][0])
    tau = min(tau, k + 1)  # where all were kept, the mean of logarithms may be a rounding more
    whole = {name: column[whole["asked"] == k] for name, column in whole.items()}
    single = np.median(np.concatenate([part["seconds"] for part in alone]))
    c = np.median(whole["draft_seconds"]) / single / k
    overhead = np.median(whole["seconds"] - whole["draft_seconds"] - whole["verify_seconds"]) / single
    wide = float(np.interp(whole["drafted"] + 1, v.index, v).mean())  # prompt lookup may draft fewer than K
    cost = costmodel.round_cost(k, c, wide, overhead)
    return {"c": c, "v": wide, "overhead": overhead, "cost": cost, "tau": tau, "predicted": tau / cost}


def held_out(machine: str, resamples: int = 100, seed: int = 0) -> pd.DataFrame:
    """Predicted beside measured speedup where the prediction has not seen the prompts it is for.

    The prompts of a cell are split in two halves, every second one; each half is predicted from the rounds of the other.
    The interval is that of predicted / measured: from the bootstrap over the prompts of the one half and the spread of
    the log ratios over those of the other, at ``LEVEL``. Cells whose halves do not both hold ``HALF`` prompts are left out.

    Returns:
        Columns: configuration, temperature, domain, k, half, prompts, speedup, the account, ratio, low, high; and the
        three factors of the ratio: tau_miss (tokens of the one half over the other's), cost_miss, own_miss.
    """
    rounds, answers = records(machine, "rounds"), records(machine, "answers")
    if rounds.empty:
        return pd.DataFrame(columns=[*_CELL, "k", "half", "prompts", "speedup", "predicted", "ratio", "low", "high"])
    rng, costs, rows = np.random.default_rng(seed), verification_costs(machine), []
    rounds, answers = (pd.concat([table, table.assign(domain="all")]) for table in (rounds, answers))
    answers["per_token"] = answers.seconds / answers.tokens
    seconds = answers.set_index([*_CELL, "prompt", "k"]).per_token
    for key, cell in rounds.groupby(_CELL, sort=True):
        prompts = list(dict.fromkeys(cell.prompt))
        if len(prompts) < 2 * HALF:
            continue
        parts = _by_prompt(cell)
        for half in (0, 1):
            seen, own = prompts[1 - half :: 2], prompts[half::2]
            for k in sorted(k for k in set(cell.k) if k > 0):

                def predict(chosen, k=k, parts=parts, v=costs[key[0]]):
                    return account([parts[p, k] for p in chosen], [parts[p, 0] for p in chosen], v)

                found = predict(seen)
                if found is None:
                    continue
                logs = np.log([seconds[(*key, prompt, 0)] / seconds[(*key, prompt, k)] for prompt in own])
                drawn = (predict(rng.choice(seen, len(seen))) for _ in range(resamples))
                spread = np.std([np.log(one["predicted"]) for one in drawn if one], ddof=1)
                half_width = stats.t.ppf((1 + LEVEL) / 2, len(own) - 1) * np.hypot(
                    spread, logs.std(ddof=1) / np.sqrt(len(own))
                )
                ratio = np.log(found["predicted"]) - logs.mean()
                # Why a cell is off: more tokens, a cheaper round, or an account that misses its own prompts.
                same = predict(own) or found
                tokens = found["tau"] / same["tau"]
                misses = {
                    "tau_miss": tokens,
                    "cost_miss": found["predicted"] / same["predicted"] / tokens,
                    "own_miss": same["predicted"] / np.exp(logs.mean()),
                }
                rows.append(
                    dict(zip(_CELL, key, strict=True))
                    | {"k": k, "half": half, "prompts": len(own), "speedup": np.exp(logs.mean()), **found, **misses}
                    | {"ratio": np.exp(ratio), "low": np.exp(ratio - half_width), "high": np.exp(ratio + half_width)}
                )
    return pd.DataFrame(rows)


def adaptive(machine: str) -> pd.DataFrame:
    """An adaptive K against the fixed K that is best on the other half of the prompts, and against the target alone.

    Paired by prompt: geometric means of time ratios with t intervals, as in :func:`speedups`. The prompts of a cell are
    split in two halves, every second one, and each half is held against the K with the largest speedup on the other, so
    that the fixed K is not chosen on the prompts it is judged on.

    Columns: configuration, temperature, domain, prompts, ks (those chosen), of_fixed, of_fixed_low, of_fixed_high,
    speedup, speedup_low, speedup_high; 1 and more means that nothing is lost.
    """
    answers, rows = records(machine, "answers"), []
    columns = [
        *["prompts", "ks", "of_fixed", "of_fixed_low", "of_fixed_high"],
        *["speedup", "speedup_low", "speedup_high"],
    ]
    if answers.empty or not (answers.k == ADAPTIVE).any():
        return pd.DataFrame(columns=[*_CELL, *columns])
    answers = pd.concat([answers, answers.assign(domain="all")])
    answers["log_seconds"] = np.log(answers.seconds / answers.tokens)
    for key, cell in answers.groupby(_CELL, sort=True):
        logs = cell.pivot(index="prompt", columns="k", values="log_seconds").loc[list(dict.fromkeys(cell.prompt))]
        fixed = [k for k in logs if k > 0]
        if ADAPTIVE not in logs or len(logs) < 4:
            continue
        halves = [logs.iloc[half::2] for half in (0, 1)]
        chosen = [other[fixed].mean().idxmin() for other in reversed(halves)]
        against = pd.concat([own[k] - own[ADAPTIVE] for own, k in zip(halves, chosen, strict=True)])
        rows.append(
            dict(zip(_CELL, key, strict=True))
            | {"prompts": len(logs), "ks": sorted(set(chosen))}
            | dict(zip(columns[2:], _ratio(against) + _ratio(logs[0] - logs[ADAPTIVE]), strict=True))
        )
    return pd.DataFrame(rows, columns=[*_CELL, *columns])


def controls(machine: str) -> pd.DataFrame:
    """The target alone against itself (A/A): two arms of one run that differ in nothing but their turn.

    Geometric means of time ratios, paired by prompt, with t intervals at a level corrected for the number of cells
    (Bonferroni): 1 lies in all of them with the probability ``LEVEL``, if a run measures what it says.

    Columns: configuration, temperature, prompts, ratio, ratio_low, ratio_high.
    """
    answers = records(machine, "answers")
    columns = ["configuration", "temperature", "prompts", "ratio", "ratio_low", "ratio_high"]
    if answers.empty or not (answers.k == CONTROL).any():
        return pd.DataFrame(columns=columns)
    answers["log_seconds"] = np.log(answers.seconds / answers.tokens)
    logs = answers.pivot(index=["configuration", "temperature", "prompt"], columns="k", values="log_seconds")
    cells = dict(list((logs[0] - logs[CONTROL]).dropna().groupby(["configuration", "temperature"])))
    level = 1 - (1 - LEVEL) / len(cells)
    rows = [dict(zip(columns, [*key, len(cell), *_ratio(cell, level)], strict=True)) for key, cell in cells.items()]
    return pd.DataFrame(rows, columns=columns)


def peers(data: pd.DataFrame) -> pd.DataFrame:
    """Every arm of ``peers.csv`` by domain ("all" over the domains): tokens a second, and speedup over its library's own baseline.

    Both are geometric means over prompts with t intervals, the speedup paired by prompt; the whole call is timed.

    Columns: domain, arm, library, baseline, k, prompts, rate, rate_low, rate_high (tokens a second), speedup, low, high,
    identical (answers that equal those of the baseline).
    """
    data = data.assign(log_rate=np.log(data.tokens / data.seconds))
    alone = data.set_index(["arm", "prompt"])[["log_rate", "ids"]].add_prefix("alone_")
    data = data.join(alone, on=["baseline", "prompt"])
    rows = []
    for key, cell in pd.concat([data, data.assign(domain="all")]).groupby(["domain", "arm"], sort=True):
        fields = cell.iloc[0][["library", "baseline", "k"]].to_dict()
        rows.append(
            dict(zip(["domain", "arm"], key, strict=True))
            | fields
            | {"prompts": len(cell)}
            | dict(zip(["rate", "rate_low", "rate_high"], _ratio(cell.log_rate), strict=True))
            | dict(zip(["speedup", "low", "high"], _ratio(cell.log_rate - cell.alone_log_rate), strict=True))
            | {"identical": int((cell.ids == cell.alone_ids).sum())}
        )
    return pd.DataFrame(rows)


def left_out(machine: str) -> dict[str, str]:
    """Arms of ``peers`` that ``machine`` could not run, with the reason."""
    steps = [run["steps"]["peers"] for run in runs(machine).values() if "peers" in run["steps"]]
    return {name: why for step in steps for name, why in step["skipped"].items()}


def ahead(data: pd.DataFrame, arm: str, other: str, domain: str = "all") -> pd.Series:
    """How many times as many tokens a second ``arm`` gives as ``other``, paired by prompt; speedup, low, high, prompts."""
    own = data if domain == "all" else data[data.domain == domain]
    logs = own.assign(log=np.log(own.seconds / own.tokens)).pivot(index="prompt", columns="arm", values="log")
    ratio = logs[other] - logs[arm]
    found = dict(zip(["speedup", "low", "high"], _ratio(ratio), strict=True)) | {"prompts": len(ratio)}
    return pd.Series(found, dtype=object)  # a count stays a count


def _ratio(logs: pd.Series, level: float = LEVEL) -> tuple[float, float, float]:
    """The geometric mean of ratios and its t interval, from their logarithms; no interval for one."""
    mean, n = logs.mean(), len(logs)
    half = stats.t.ppf((1 + level) / 2, n - 1) * logs.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return np.exp(mean), np.exp(mean - half), np.exp(mean + half)


def best(table: pd.DataFrame, configuration: str, domain: str = "all", temperature: float = 0.0) -> pd.Series | None:
    """The row with the largest speedup of one configuration, domain and temperature; None if nothing was measured."""
    rows = table[(table.configuration == configuration) & (table.domain == domain) & (table.temperature == temperature)]
    return None if rows.empty else rows.loc[rows.speedup.idxmax()]


def best_of_each(machine: str) -> pd.DataFrame:
    """The best K of every configuration over all domains, greedy: rows of :func:`speedups`."""
    table = speedups(machine)
    table = table[(table.domain == "all") & (table.temperature == table.temperature.min())]
    return table.loc[table.groupby("configuration").speedup.idxmax()]


def across(machines: list[str]) -> pd.DataFrame:
    """What each machine makes of each configuration that it measured: costs, best K and its speedup.

    Returns:
        :func:`best_of_each` with the columns machine, c (missing: no draft model), v5, the verification cost v(5), and
        cost, of a round of four draft tokens in target passes.
    """
    found = []
    for machine in machines:
        c = latency_ratios(machine).set_index("configuration")["median"]
        v5 = forward_costs(machine).query("model == 'target' and n == 5").set_index("configuration").v
        rows = best_of_each(machine).assign(machine=machine)
        found.append(rows.assign(c=rows.configuration.map(c), v5=rows.configuration.map(v5)))
    return pd.concat(found, ignore_index=True).assign(cost=lambda rows: 4 * rows.c.fillna(0) + rows.v5)


def greedy_agreement(machine: str) -> pd.DataFrame:
    """How many greedy answers equal the target-only one, by configuration and K; the widest top-2 gap at a divergence."""
    answers = records(machine, "answers")
    greedy = answers[(answers.temperature == 0) & ((answers.k > 0) | (answers.k == ADAPTIVE))]
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


def pooled(tokens: pd.DataFrame) -> pd.DataFrame:
    """The paper's test and its own null, on each pair of arms of one configuration's sampled tokens.

    Columns: first, second, tokens_first, tokens_second, statistic, dof and pvalue (the textbook's, which does not hold
    for answers), ratio (statistic over dof), permuted (``equivalence.Permutation``: whole answers exchanged).
    """
    counts = pd.crosstab(tokens.token, tokens.arm)
    rows = []
    for first, second in PAIRS:
        if first not in counts or second not in counts:
            continue
        test = equivalence.two_sample_chi2(counts[first], counts[second])
        sizes = {"tokens_first": int(counts[first].sum()), "tokens_second": int(counts[second].sum())}
        rows.append(
            {"first": first, "second": second, **sizes, **vars(test), "ratio": test.statistic / max(test.dof, 1)}
            | {"permuted": equivalence.permutation_test(tokens[tokens.arm.isin([first, second])])}
        )
    return pd.DataFrame(rows)


def family(tokens: pd.DataFrame, pairs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Every calibrated test on one configuration's sampled tokens, with Holm's correction over all of them.

    Pairs of arms by permutation of whole answers, each arm by uniformity and likelihood under the target's own scores.

    Args:
        pairs: what :func:`pooled` made of the same tokens, if it is there.

    Returns:
        Columns: test, arms, statistic, pvalue, holm. A difference is seen where ``holm`` <= ``ALPHA``.
    """
    rows = []
    for pair in (pooled(tokens) if pairs is None else pairs).itertuples():
        arms, test = f"{pair.first}, {pair.second}", pair.permuted
        rows.append({"test": "permutation of answers", "arms": arms, **_values(test)})
    for seed, (arm, cell) in enumerate(tokens.groupby("arm")):  # each arm has random parts of its own
        uniform = equivalence.uniformity(equivalence.pit(cell, seed=seed))
        rows.append({"test": "uniformity (PIT)", "arms": arm, **_values(uniform)})
        rows.append({"test": "likelihood z", "arms": arm, **_values(equivalence.likelihood_z(cell))})
    table = pd.DataFrame(rows).sort_values("test", kind="stable", ignore_index=True)
    return table.assign(holm=equivalence.holm(table.pvalue))


def repeated(tokens: pd.DataFrame, repeats: pd.DataFrame) -> pd.DataFrame:
    """The pooled test between samples of the target alone: all pairs of batches, each batch with the target-only arm.

    Columns: first, second, statistic, dof, pvalue, ratio. Pairs share batches, so they are not independent.
    """
    batches = repeats.assign(arm=repeats.batch, token=repeats.ids.str.split()).explode("token").astype({"token": int})
    arms = pd.concat([tokens[tokens.arm == "target-only"], batches])
    counts = pd.crosstab(arms.token, arms.arm.astype(str))
    rows = []
    for first, second in itertools.combinations(counts, 2):
        test = equivalence.two_sample_chi2(counts[first], counts[second])
        rows.append({"first": first, "second": second, **vars(test), "ratio": test.statistic / max(test.dof, 1)})
    return pd.DataFrame(rows)


def one_step(steps: pd.DataFrame) -> pd.DataFrame:
    """One step on frozen prefixes, by configuration and position, Holm's correction over all rows.

    Columns: rows, tv (median, draft to target), law_error (largest), pvalue and holm (smallest), draws (fewest).
    """
    steps = steps.assign(holm=equivalence.holm(steps.pvalue))
    return (
        steps.groupby(["configuration", "position"])
        .agg(
            rows=("tv", "size"),
            tv=("tv", "median"),
            law_error=("law_error", "max"),
            pvalue=("pvalue", "min"),
            holm=("holm", "min"),
            draws=("draws", "min"),
        )
        .reset_index()
    )


def block_shape(passes: pd.DataFrame) -> pd.DataFrame:
    """Rows of a K + 1 token pass against those of one-token passes and of a pass without a cache, by configuration.

    Columns: rows, tv (median), tv_largest, error_block, error_single (largest, logits), flipped (rows with another
    favourite), gap (the widest between the two best logits where it flipped; missing where none did).
    """
    flips = passes.assign(gap=passes.gap.where(passes.flipped.astype(bool)))
    return (
        flips.groupby("configuration")
        .agg(
            rows=("tv", "size"),
            tv=("tv", "median"),
            tv_largest=("tv", "max"),
            error_block=("error_block", "max"),
            error_single=("error_single", "max"),
            flipped=("flipped", "sum"),
            gap=("gap", "max"),
        )
        .reset_index()
    )


def fidelity(machine: str) -> pd.DataFrame:
    """How far a target whose weights are not dense is from the dense one, on rows of its own answers.

    Columns: configuration, rows, tv (median), tv_largest, agreement (share of rows with the same favourite), low, high.
    """
    rows = []
    data = records(machine, "passes")
    for name, cell in data.groupby("configuration") if "tv_dense" in data else ():
        cell = cell[cell.tv_dense.notna()]
        if len(cell):
            share, low, high = _proportion(int(cell.agrees_dense.astype(bool).sum()), len(cell))
            rows.append(
                {
                    "configuration": name,
                    "rows": len(cell),
                    "tv": cell.tv_dense.median(),
                    "tv_largest": cell.tv_dense.max(),
                }
                | {"agreement": share, "low": low, "high": high}
            )
    return pd.DataFrame(rows, columns=["configuration", "rows", "tv", "tv_largest", "agreement", "low", "high"])


def detections(data: pd.DataFrame) -> pd.DataFrame:
    """How often each level saw each planted fault, at the largest size tried, in the order of the records.

    Columns: those of the records; planted (not where the source was left as it is, to count false alarms); rate; low, the
    lower bound of the power at confidence ``LEVEL`` (Clopper and Pearson, one-sided; of what is certain the rate); seen,
    low >= ``SEEN``.
    """
    largest = data.groupby(["fault", "level"])["size"].transform("max")
    data = data[data["size"] == largest].reset_index(drop=True)
    certain, rate = data.certain.astype(bool), data.detected / data.repeats
    tests = [stats.binomtest(k, n, alternative="greater") for k, n in zip(data.detected, data.repeats, strict=True)]
    low = rate.where(certain, [test.proportion_ci(LEVEL).low for test in tests])
    planted = data.module.fillna("") != ""
    return data.assign(certain=certain, planted=planted, rate=rate, low=low, seen=low >= SEEN)


def level_power(data: pd.DataFrame) -> pd.DataFrame:
    """Each level and size of the sample: faults tried, how many were seen (as in :func:`detections`), rates.

    Columns: level, size, faults, seen, rate (mean over faults), alarms (share of runs detected where nothing was planted).
    """
    rows = []
    for (level, size), cell in data.groupby(["level", "size"], sort=False):
        found = detections(cell)
        faults, none = found[found.planted], found[~found.planted]
        alarms = none.detected.sum() / none.repeats.sum() if len(none) else np.nan
        rows.append(
            {"level": level, "size": size, "faults": len(faults), "seen": int(faults.seen.sum())}
            | {"rate": faults.rate.mean(), "alarms": alarms}
        )
    return pd.DataFrame(rows)


def calibrated(data: pd.DataFrame) -> pd.DataFrame:
    """Rate of false alarms of each test under a true null, with Clopper and Pearson's interval.

    Columns: test, dependence, repeats, level, rejected, rate, low, high; holm, of the exact one-sided test that the rate
    is no more than the level, over all rows.
    """
    rows = list(zip(data.rejected, data.repeats, data.level, strict=True))
    interval = [stats.binomtest(k, n).proportion_ci(LEVEL) for k, n, _ in rows]
    above = [stats.binomtest(k, n, level, alternative="greater").pvalue for k, n, level in rows]
    return data.assign(
        rate=data.rejected / data.repeats,
        low=[i.low for i in interval],
        high=[i.high for i in interval],
        holm=equivalence.holm(above),
    )


def _values(test):
    return {"statistic": test.statistic, "pvalue": test.pvalue}


def _proportion(kept, of):
    if of == 0:
        return np.nan, np.nan, np.nan
    interval = stats.binomtest(kept, of).proportion_ci(LEVEL, method="wilson")
    return kept / of, interval.low, interval.high
