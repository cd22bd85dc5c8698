"""Rows of a real pair: what one round makes of them, and what the shape of a pass does to them. Torch is loaded when asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from specdec.equivalence import one_sample_chi2

# Draws are made among the ids that either model gives more than this; what is left out is recorded.
_NEGLIGIBLE = 1e-6


def emitted_law(p, q):
    """The law of the token that a round emits at one position, summed over every token the draft may propose.

    Args:
        p, q: (V,) float64, the target's law there and the draft's.

    Returns:
        (V,), which is p if nothing is lost: sum over x of q(x) [a(x) at x + (1 - a(x)) residual], with a(x) = P(x is kept).
    """
    from specdec import verification

    ids = (q > 0).nonzero()[:, 0]
    kept = q.clone()
    kept[ids] *= verification.acceptance(p.expand(len(ids), -1), q.expand(len(ids), -1), ids)
    return kept + (q.sum() - kept.sum()) * verification.residual(p, q)


def frozen_round(target, draft, context: Sequence[int], k: int, generator):
    """(p (K + 1, V), q (K, V), drafted (K,)) of one round at T = 1 behind ``context``, before verification."""
    import torch

    from specdec.sampling import Sampling

    draft.start(context[:-1], target)
    drafted, q = draft.propose(context, k, Sampling(), generator)
    target.drop_last(target.length)
    target.prefill(context[:-1])
    p = Sampling().probabilities(target.logits([context[-1], *drafted.tolist()]))
    target.drop_last(target.length)
    return p, torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1])), drafted


def one_step(p, q, draws: int, generator) -> Iterator[dict]:
    """Each position of one round by itself, the drafts before it kept: the exact law of its token, and draws of it.

    Args:
        p: (K + 1, V), q: (K, V): the rows of one round.
        draws: of the shipped ``verify``, each with a draft token drawn anew from q.

    Yields:
        for position 1..K + 1 (K + 1 is the bonus token) the columns of ``onestep.csv`` from ``position`` on.
    """
    import torch

    from specdec.sampling import draw
    from specdec.verification import verify

    p, q = (rows.double() / rows.double().sum(-1, keepdim=True) for rows in (p, q))
    for i in range(len(p)):
        here, own = p[i : i + 2], q[i : i + 1]
        emitted = emitted_law(here[0], own[0]) if len(own) else here[0]
        if len(own):
            _same_as_law(here, own)
        used = (torch.cat([here[:1], own]) > _NEGLIGIBLE).any(0)
        dropped = max(float(row[~used].sum()) for row in (here[0], *own))
        here, own = (rows[:, used] / rows[:, used].sum(-1, keepdim=True) for rows in (here, own))
        counts = np.zeros(int(used.sum()))
        for _ in range(draws):
            token = [draw(row, generator) for row in own]
            accepted, following = verify(here, own, torch.tensor(token, dtype=torch.long), generator)
            counts[token[0] if accepted else following] += 1
        fit = one_sample_chi2(counts, here[0].numpy())
        yield {
            "position": i + 1,
            "accepted_prefix": i,
            "tv": float((p[i] - q[i]).abs().sum() / 2) if i < len(q) else None,
            "law_error": float((emitted - p[i]).abs().max()),
            "ids": int(used.sum()),
            "dropped": dropped,
            "draws": draws,
            "statistic": fit.statistic,
            "dof": fit.dof,
            "pvalue": fit.pvalue,
        }


def _same_as_law(p, q, count: int = 20) -> None:
    """``emitted_law`` takes acceptance and residual; for the most probable drafts they must be what ``law`` says."""
    import torch

    from specdec import verification

    for token in q[0].topk(min(count, int((q[0] > 0).sum()))).indices:
        stop, following = verification.law(p, q, token[None])
        kept = verification.acceptance(p[:1], q, token[None])
        if not (stop[1:].equal(kept) and torch.allclose(following[0], verification.residual(p[0], q[0]))):
            raise AssertionError(f"law and its parts disagree about draft token {int(token)}")


def recorded(target):
    """``target`` with a list ``blocks`` of (ids in the cache before, ids, logits) of each of its passes."""
    other, logits = target.twin(), target.__class__.logits
    other.blocks = []

    def kept(ids):
        start, rows = other.length, logits(other, ids)
        other.blocks.append((start, list(ids), rows))
        return rows

    other.logits = kept
    return other


def readings(blocks, text: list[int]) -> Iterator[tuple]:
    """(place in ``text``, row) of every recorded row that has read, of its block, only what stands in ``text``."""
    for start, ids, rows in blocks:
        for i, row in enumerate(rows):
            if text[start : start + i + 1] == ids[: i + 1]:
                yield start + i, row


def passes(target, prompt_ids: Sequence[int], tokens: Sequence[int], blocks, dense=None) -> Iterator[dict]:
    """The rows an answer was drawn from, against rows of one token and of a pass without a cache over the same text.

    Args:
        blocks: what :func:`recorded` kept while the answer was decoded.
        dense: the target with dense weights, where its own are not.

    Yields:
        for each token the columns of ``passes.csv`` from ``position`` on.

    Raises:
        ValueError: a token that was drawn from none of the rows: the cache did not hold the answer.
    """
    text = [*prompt_ids, *tokens]
    drawn_from = dict(readings(blocks, text))
    first = len(prompt_ids) - 1
    missing = [at - first for at in range(first, len(text) - 1) if at not in drawn_from]
    if missing:
        raise ValueError(
            f"no recorded row read just what stands before token {missing[0]}: the cache was not the answer"
        )
    target.drop_last(target.length)
    free = target.logits(text[:-1])[first:]
    target.drop_last(target.length)
    target.prefill(text[:first])
    if dense is not None:
        dense.drop_last(dense.length)
        exact = dense.logits(text[:-1])[first:]
        dense.drop_last(dense.length)
    for position in range(len(tokens)):
        single, block = target.logits([text[first + position]])[0], drawn_from[first + position]
        best = single.topk(2)
        yield {
            "position": position,
            "tv": _tv(single, block),
            "error_block": float((block - free[position]).abs().max()),
            "error_single": float((single - free[position]).abs().max()),
            "gap": float(best.values[0] - best.values[1]),
            "flipped": int(block.argmax()) != int(best.indices[0]),
            "tv_dense": None if dense is None else _tv(exact[position], free[position]),
            "agrees_dense": None if dense is None else bool(exact[position].argmax() == free[position].argmax()),
        }
    target.drop_last(target.length)


def _tv(one, other) -> float:
    """Total variation between the laws of two rows of logits."""
    return float((one.softmax(-1) - other.softmax(-1)).abs().sum() / 2)
