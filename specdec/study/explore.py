"""The interactive page: measured starting points, put into the template ``explore.html`` beside this file.

The page works out the speedup by the formula of ``specdec.costmodel``, with S_k = a^k; a test holds the two equal.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from specdec import costmodel
from specdec.study import chapter, tables
from specdec.study.configurations import study

TEMPLATE = Path(__file__).with_name("explore.html")
STEP = 2  # decimals of a slider


def starts(machine: str, note: str = "") -> list[dict]:
    """Where the sliders can start: one for every configuration, temperature and domain that ``machine`` measured.

    c and the overhead are those at the K that was fastest; ``a`` is the one acceptance that gives the tokens a pass
    counted at that K. All three have the decimals of a slider. ``v`` is the measured curve as it is. A draft that may
    propose fewer than K has the mean over its rounds in its place, at the measured K only.

    Args:
        note: put after the name of the configuration, such as the machine.
    """
    predicted, costs = chapter.sort(tables.predictions(machine)), tables.forward_costs(machine)
    found = []
    for name in chapter.in_order(predicted.configuration):
        about = study().configurations[name]
        target = costs[(costs.configuration == name) & (costs.model == "target")].set_index("n").v
        own = predicted[predicted.configuration == name]
        for (temperature, domain), cell in own.groupby(["temperature", "domain"]):
            fastest = cell.loc[cell.speedup.idxmax()]
            whole = about.draft.kind != "prompt-lookup"
            v = target.to_dict() if whole else {1: 1.0} | dict(zip(cell.k + 1, cell.v, strict=True))
            found.append(
                {
                    "name": f"{name}{note}",
                    "title": f"{name}{note}: {about.title}",
                    "domain": "all domains" if domain == "all" else domain,
                    "sampling": chapter.sampling(temperature),
                    "whole": whole,
                    "k": int(fastest.k),
                    "c": round(float(fastest.c), STEP),
                    "o": round(float(fastest.overhead), STEP),
                    "a": round(constant_acceptance(fastest.tau, int(fastest.k)), STEP),
                    "v": [[int(n), float(cost)] for n, cost in sorted(v.items())],
                    "points": [_point(row) for row in cell.itertuples()],
                }
            )
    return found


def constant_acceptance(tau: float, k: int) -> float:
    """The a for which a round of ``k`` guesses, each kept with chance a if all before it were, gives ``tau`` tokens."""
    return float(brentq(lambda a: costmodel.closed_form(a, k) - tau, 0, 1))


def speedup(start: dict, k: int, scale: float = 1.0, **changed: float) -> float:
    """What the page shows for a starting point at ``k``: c, a or o changed, v's distance from one times ``scale``."""
    values = start | changed
    n, v = np.array(start["v"]).T
    wide = 1 + scale * (float(np.interp(k + 1, n, v)) - 1)
    return costmodel.speedup(values["a"] ** np.arange(1, k + 1), values["c"], wide, values["o"])


def html(found: list[dict], first: int = 0) -> str:
    """The page as one piece of HTML that loads nothing; it starts from ``found[first]``."""
    data = json.dumps({"starts": found, "first": first}, allow_nan=False).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", data)


def _point(row) -> dict:
    bounds = {} if np.isnan(row.low) else {"low": float(row.low), "high": float(row.high)}
    few = bool(row.prompts < tables.FEW)
    return {"k": int(row.k), "speedup": float(row.speedup), "prompts": int(row.prompts), "few": few} | bounds
