"""Clocks that wait for the device, the latency ratio c and the verification cost v(n)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from specdec import devices
from specdec.costmodel import Costs


def timed(call: Callable[[], Any], device: torch.device | str | None = None) -> tuple[Any, float]:
    """The result of ``call()`` and its seconds, with the device idle when either clock is read."""
    devices.synchronise(device)
    begin = time.perf_counter()
    result = call()
    devices.synchronise(device)
    return result, time.perf_counter() - begin


def forward_times(
    models: dict[str, Any], lengths: Sequence[int], context: Sequence[int], repeats: int
) -> Iterator[dict]:
    """Seconds of one forward pass of n tokens behind a cached context.

    Every model and n is warmed up once; then all are visited in turn, ``repeats`` times, so that a busy spell of the
    machine falls on all of them alike.

    Args:
        models: name -> model (``specdec.models``).
        lengths: the n to measure, each >= 1.
        context: ids put in the cache.
        repeats: how many visits to each.

    Yields:
        {"model", "n", "repeat", "context", "seconds"}; repeat counts from 0.
    """
    for model in models.values():
        model.drop_last(model.length)
        getattr(model, "prefill", model.logits)(context)  # a user's model need not offer prefill
    block = torch.tensor([context[i % len(context)] for i in range(max(lengths))])

    def once(model, n):
        _, seconds = timed(lambda: devices.rows(model, block[:n]), getattr(model, "device", None))
        model.drop_last(n)
        return seconds

    for model in models.values():
        for n in lengths:
            once(model, n)
    for repeat in range(repeats):
        for name, model in models.items():
            for n in lengths:
                yield {"model": name, "n": n, "repeat": repeat, "context": len(context), "seconds": once(model, n)}
    for model in models.values():
        model.drop_last(model.length)


def measure_costs(target, draft, context: Sequence[int], k_max: int, repeats: int = 5) -> Costs:
    """What ``AdaptiveK`` needs to know of a pair on this machine: c, and v(n) up to n = k_max + 1.

    Medians over ``repeats`` of the ratios within one repeat. The overhead of a round is left out: it is small beside a
    pass.

    Args:
        target: a model; draft: as for ``specdec.speculative``; None, or one without a model of its own, costs nothing.
        context: ids put in the cache before a pass is timed.
    """
    models = {"target": target} | ({"draft": draft.model} if hasattr(draft, "model") else {})
    lengths = sorted({n for n in (1, 2, 3, 4, 5, 7) if n <= k_max} | {1, k_max + 1})
    seconds = {}
    for row in forward_times(models, lengths, context, repeats):
        seconds.setdefault((row["model"], row["n"]), []).append(row["seconds"])

    def ratio(model, n):
        return statistics.median(a / b for a, b in zip(seconds[model, n], seconds["target", 1], strict=True))

    return Costs(ratio("draft", 1) if "draft" in models else 0.0, {n: ratio("target", n) for n in lengths})


def read_bandwidth(device: torch.device | str, gigabytes: float, repeats: int) -> list[float]:
    """Bytes a second at which the device reads its main memory: the sum of a large tensor, ``repeats`` times.

    Decoding one token reads every weight once, so bytes of weights over this rate is the least time a token can take.
    """
    data = torch.ones(int(gigabytes * 1e9 / 4), dtype=torch.float32, device=device)
    size = data.numel() * data.element_size()
    data.sum()  # warm up
    return [size / timed(data.sum, device)[1] for _ in range(repeats)]
