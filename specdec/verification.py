"""Which draft tokens are kept, and what comes after them: pure functions on probabilities.

Notation: K draft tokens x_1..x_K with x_i drawn from q_i = q(. | context, x_<i); p_i the target's law at the same place,
i = 1..K + 1. The rejection rule keeps a prefix of the draft and adds one token, so that what is emitted follows p.

* token rule: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318, algorithm 2;
* block rule: Sun et al., arXiv:2403.10444, algorithm 2.

Both rules are written once, in :func:`law`; :func:`verify` only draws from it. Tests that enumerate :func:`law`
therefore test the code that ships.
"""

from __future__ import annotations

import torch

from specdec.sampling import draw

RULES = ("token", "block")


def acceptance(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """P(draft token i is kept | those before it are): min(1, p_i(x_i) / q_i(x_i)).

    Args:
        p: (K, V) or (K + 1, V), the target's laws.
        q: (K, V), the laws the tokens were drawn from.
        drafted: (K,) ids.

    Returns:
        (K,), in the type of p.

    Raises:
        ValueError: a drafted id has q = 0, so it cannot have been drawn from q.
    """
    drafted = torch.as_tensor(drafted, dtype=torch.long)
    _check_drawn(q, drafted)
    return _ratio(p, q, drafted).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    """The law of the token that replaces a rejected one: norm(max(0, weight * p - q)).

    Args:
        p, q: (..., V).
        weight: a number, or (..., 1).

    Returns:
        (..., V). Where nothing is left (p == q up to rounding), p itself, the limit in which rejection has
        probability 0.
    """
    excess = (weight * p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, p)


def law(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, rule: str = "token"
) -> tuple[torch.Tensor, torch.Tensor]:
    """What verification does with one draft, as probabilities.

    Args:
        p: (K + 1, V), the target's law at each draft position and after the last.
        q: (K, V), the laws the tokens were drawn from.
        drafted: (K,) ids.
        rule: "token" or "block".

    Returns:
        ``stop`` (K + 1,), P(exactly i draft tokens are kept), i = 0..K; and ``next`` (K + 1, V), the law of the token
        emitted after i kept ones, the residual for i < K and p_(K+1) (bonus) for i = K.

    Raises:
        ValueError: shapes do not fit, an unknown rule, or a drafted id with q = 0.
    """
    drafted = torch.as_tensor(drafted, dtype=torch.long)
    found = _law(p, q, drafted, rule)
    _check_drawn(q, drafted)
    return found


def _law(p, q, drafted, rule):
    """:func:`law` without a look at the values: on a GPU nothing is waited for."""
    count = len(drafted)
    if p.ndim != 2 or q.shape != (count, p.shape[1]) or len(p) != count + 1:
        raise ValueError(
            f"for K = {count} p must be (K + 1, V) and q (K, V), not {tuple(p.shape)} and {tuple(q.shape)}"
        )
    one = p.new_ones(1)
    if rule == "token":
        keep = _ratio(p, q, drafted).clamp(max=1)
        stop = torch.cat([one, keep.cumprod(0)]) * torch.cat([1 - keep, one])
        weight = p.new_ones(count, 1)
    elif rule == "block":
        reach = [one[0]]  # the p_i of the paper: how likely the draft's first i tokens are under p, capped step by step
        for ratio in _ratio(p, q, drafted):
            reach.append((reach[-1] * ratio).clamp(max=1))
        weight = torch.stack(reach[:-1])[:, None] if count else p.new_ones(0, 1)
        excess = (weight * p[:-1] - q).clamp(min=0).sum(-1)
        slack = excess + (1 - weight[:, 0])
        end = torch.cat(
            [torch.where(slack > 0, excess / slack, 1.0), reach[-1][None]]
        )  # the h_i: stop at i, unless later
        later = torch.cat([(1 - end[1:]).flip(0).cumprod(0).flip(0), one])  # no later position stops
        stop = end * later
    else:
        raise ValueError(f"rule must be one of {RULES}, not {rule!r}")
    return stop, torch.cat([residual(p[:-1], q, weight), p[-1:]])


def verify(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, generator: torch.Generator, rule: str = "token"
) -> tuple[int, int]:
    """Draw one outcome of :func:`law`: how many draft tokens are kept, and the token that follows them.

    Args and errors as for :func:`law`; ``generator`` is the only source of randomness.

    Returns:
        (accepted, next_token), accepted in 0..K.
    """
    drafted = torch.as_tensor(drafted, dtype=torch.long)
    stop, following = _law(p, q, drafted, rule)
    accepted = draw(stop, generator)
    token = draw(following[accepted[None]][0], generator)
    accepted, token = torch.stack([accepted, token]).tolist()  # where the laws are on a GPU, here it is waited for
    _check_drawn(q, drafted)
    return accepted, token


def _ratio(p, q, drafted):
    """p_i(x_i) / q_i(x_i), (K,)."""
    at = torch.arange(len(drafted), device=p.device), drafted
    # Finite: by the block rule 0 * inf may follow, after a token that p bars.
    return (p[at] / q[at]).clamp(max=torch.finfo(p.dtype).max)


def _check_drawn(q, drafted):
    impossible = (q.gather(1, drafted[:, None])[:, 0] <= 0).tolist()
    if any(impossible):
        bad = impossible.index(True)
        raise ValueError(
            f"draft token {int(drafted[bad])} at position {bad} has q = 0: it cannot have been drawn from q"
        )
