"""The loops: target-only and speculative decoding of one sequence, and the cache-free score of a finished answer.

A round of speculative decoding (Leviathan et al., arXiv:2211.17192, algorithm 1) has three steps: the draft proposes K
tokens, one forward pass of the target scores them all, and verification keeps a prefix and adds one token of the target's.
Target-only decoding is the same loop with K = 0: a round is one forward pass and one token.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from specdec import devices
from specdec.costmodel import AdaptiveK
from specdec.drafts import _name, _read
from specdec.latency import timed
from specdec.sampling import Sampling
from specdec.verification import RULES, verify


@dataclass(frozen=True)
class Round:
    """One round. Times in seconds; ``emitted`` = ``accepted`` + 1 except where the end of the answer cut the round.

    asked: draft tokens asked for at most, K or what room was left; drafted: draft tokens proposed; accepted: draft tokens kept in
    the answer; emitted: tokens added to the answer; start: ids in the context before the round; ended: cut by the end of
    the answer, so out of the number at risk; draft_seconds: proposing, forwards and draws; verify_seconds: the target's
    forward; forward_seconds: all forwards; seconds: the whole round.
    """

    asked: int
    drafted: int
    accepted: int
    emitted: int
    start: int
    ended: bool
    draft_seconds: float
    verify_seconds: float
    forward_seconds: float
    seconds: float


@dataclass
class Decoded:
    """An answer: ``tokens`` (new ids only; an end token is the last of them), its ``rounds``, why it stopped.

    stop: "eos", "length" (max_new_tokens reached) or "context" (the target's window is full).
    prefill_seconds: the prompt but its last token, which round 1 starts on; target and draft together.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stop: str = "length"
    prefill_seconds: float = 0.0


@dataclass(frozen=True)
class Score:
    """What the target says of one emitted token, given everything before it.

    logp: log p(x), natural; entropy, varentropy: mean and variance of -log p under the target's own law (nat, nat^2);
    cdf_id: mass of lower ids; cdf_rank: mass of more probable tokens (lower ids first among equals); probability: p(x).
    """

    token: int
    logp: float
    entropy: float
    varentropy: float
    cdf_id: float
    cdf_rank: float
    probability: float


def autoregressive(
    target,
    prompt_ids: Sequence[int] | torch.Tensor,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    eos: int | Iterable[int] | None = None,
) -> Decoded:
    """Target-only decoding: one token a forward pass. Arguments and errors as for :func:`speculative`."""
    return _decode(target, None, prompt_ids, 0, max_new_tokens, sampling, seed, eos, "token")


def speculative(
    target,
    draft,
    prompt_ids: Sequence[int] | torch.Tensor,
    k: int | AdaptiveK,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    eos: int | Iterable[int] | None = None,
    rule: str = "token",
) -> Decoded:
    """Speculative decoding: the law of the answer is the target's, whatever the draft.

    Args:
        target: a model (``specdec.models``): ``vocab_size``, ``max_context``, ``length``, ``logits``, ``drop_last``.
        draft: see ``specdec.drafts``.
        prompt_ids: the prompt, n >= 1 ids; one sequence (batch size one).
        k: draft length K >= 0; 0 is target-only decoding. Less is drafted where the answer or the window ends. An
            :class:`~specdec.costmodel.AdaptiveK` chooses it round by round, or token by token.
        max_new_tokens: at most so many new tokens, >= 0.
        sampling: the filters, the same for draft and target.
        seed: of this call's own generator (its low 32 bits count); global random state is neither read nor changed.
        eos: end-token ids; None never stops (``target.eos`` holds the model's own).
        rule: "token" or "block" (``specdec.verification``).

    Raises:
        ValueError: a bad argument, or a prompt that does not fit; before any work.
        TypeError: an argument of the wrong kind; before any work.
        FloatingPointError: logits with NaN or +inf, naming the model and the position.
    """
    return _decode(target, draft, prompt_ids, k, max_new_tokens, sampling, seed, eos, rule)


def score(
    target, prompt_ids: Sequence[int] | torch.Tensor, tokens: Sequence[int], sampling: Sampling = Sampling()
) -> list[Score]:
    """Score an answer in one pass from an empty cache: independent of how it was decoded.

    Args:
        tokens: the answer's n new ids.

    Returns:
        n records, one a token, under the law that ``sampling`` makes of the target's logits; sums in float64.
    """
    prompt, tokens = _ids(prompt_ids, target, "prompt_ids"), _ids(tokens, target, "tokens", empty=True)
    _check_sampling(sampling)
    if not tokens:
        return []
    if len(prompt) + len(tokens) - 1 > target.max_context:
        raise ValueError(
            f"prompt and answer ({len(prompt)} + {len(tokens)}) exceed the context of {target.max_context}"
        )
    target.drop_last(target.length)
    logits = target.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
    target.drop_last(target.length)
    history = [prompt + tokens[:i] for i in range(len(tokens))] if sampling.repetition_penalty != 1 else None
    records = []
    for i, token in enumerate(tokens):
        p = sampling.probabilities(
            logits[i : i + 1], history and history[i : i + 1], where=_name(target), start=len(prompt) + i
        )[0].double()
        surprise = -torch.where(p > 0, p, 1.0).log()  # 0 log 0 = 0
        entropy = float((p * surprise).sum())
        above = (p > p[token]) | ((p == p[token]) & (torch.arange(len(p)) < token))
        records.append(
            Score(
                token=token,
                logp=float(p[token].log()),
                entropy=entropy,
                varentropy=float((p * (surprise - entropy).square()).sum()),
                cdf_id=float(p[:token].sum()),
                cdf_rank=float(p[above].sum()),
                probability=float(p[token]),
            )
        )
    return records


def _decode(target, draft, prompt_ids, k, max_new_tokens, sampling, seed, eos, rule) -> Decoded:
    context = _ids(prompt_ids, target, "prompt_ids")
    adaptive = k if isinstance(k, AdaptiveK) else None
    k = k.k_max if adaptive else _count(k, "k")
    max_new_tokens = _count(max_new_tokens, "max_new_tokens")
    _check_sampling(sampling)
    ends = _end_ids(eos)
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, not {rule!r}")
    if k and not hasattr(draft, "propose"):
        raise TypeError(f"draft must have a method propose, as a ModelDraft or PromptLookup has; {draft!r} has not")
    if len(context) > target.max_context:
        raise ValueError(f"the prompt has {len(context)} ids, the target's context holds {target.max_context}")
    generator = torch.Generator().manual_seed(operator.index(seed))
    out = Decoded()
    room = min(max_new_tokens, target.max_context - len(context))
    full = "length" if room == max_new_tokens else "context"
    if room == 0:
        out.stop = full
        return out

    def prefill():
        if k and hasattr(draft, "start"):
            draft.start(context[:-1], target)  # first: it refuses pairs that do not fit
        target.drop_last(target.length)
        _read(target, context[:-1])

    device, draft_device = getattr(target, "device", None), getattr(draft, "device", None)
    out.prefill_seconds = timed(prefill, device)[1]
    running = AdaptiveK.start
    while room > len(out.tokens):
        begin = time.perf_counter()
        start = len(context)
        length, speedup = adaptive.choose(running) if adaptive else (k, None)
        confidences, enough = [], None
        if adaptive and length and getattr(draft, "confident", False):
            length, enough = k, functools.partial(_enough, adaptive, running, speedup, confidences)
        asked = min(length, room - len(out.tokens) - 1)  # the round adds one token of the target's own
        drafting = getattr(draft, "forward_seconds", 0.0)
        draft_marks = [devices.mark(draft_device)]
        ids, q = _proposed(draft, context, asked, sampling, generator, target.vocab_size, enough)
        draft_marks.append(devices.mark(draft_device))

        verify_marks = [devices.mark(device)]
        last = devices.send(torch.tensor(context[-1:]), ids.device)
        logits = devices.rows(target, torch.cat([last, ids]))
        verify_marks.append(devices.mark(device))
        penalised = sampling.repetition_penalty != 1
        history = [context + ids[:i].tolist() for i in range(len(ids) + 1)] if penalised else None
        p = sampling.probabilities(logits, history, where=f"target model {_name(target)}", start=start)
        q, ids = devices.send(q, p.device), devices.send(ids, p.device)
        accepted, following = verify(p, q, ids, generator, rule)  # waits for the device, the only wait of a round
        _check_read(p, q, draft, target, start)
        drafted = ids.tolist()
        drafting = getattr(draft, "forward_seconds", 0.0) - drafting
        verify_seconds = devices.seconds_between(*verify_marks)
        draft_seconds = devices.seconds_between(*draft_marks) if asked else 0.0
        if adaptive:
            running = adaptive.after(running, confidences or [1.0] * len(drafted), accepted)

        emitted = [*drafted[:accepted], following]
        end = next((i for i, token in enumerate(emitted) if token in ends), None)
        if end is not None:
            emitted = emitted[: end + 1]
        context += emitted
        out.tokens += emitted
        target.drop_last(target.length - (len(context) - 1))  # the last token is fed by the next round
        out.rounds.append(
            Round(
                asked=asked,
                drafted=len(drafted),
                accepted=min(accepted, len(emitted)),
                emitted=len(emitted),
                start=start,
                ended=len(emitted) <= accepted,
                draft_seconds=draft_seconds,
                verify_seconds=verify_seconds,
                forward_seconds=drafting + verify_seconds,
                seconds=time.perf_counter() - begin,
            )
        )
        if end is not None:
            out.stop = "eos"
            return out
    out.stop = full
    return out


def _enough(adaptive, running, speedup, confidences, confidence) -> bool:
    """What a draft is asked for after each token; ``confidences`` are kept for the end of the round."""
    confidences.append(confidence)
    return adaptive.enough(running, speedup, confidences)


def _proposed(draft, context, asked, sampling, generator, vocab_size, enough):
    """The draft's tokens and their laws, padded with zeros to the target's vocabulary."""
    if asked == 0:
        return torch.empty(0, dtype=torch.long), torch.empty(0, vocab_size)
    ids, q = draft.propose(context, asked, sampling, generator, *([enough] if enough else []))
    if len(ids) > asked or q.ndim != 2 or len(q) != len(ids) or q.shape[1] > vocab_size:
        raise ValueError(
            f"the draft gave {len(ids)} ids with q of shape {tuple(q.shape)}; asked were at most {asked} over {vocab_size} ids"
        )
    if q.shape[1] < vocab_size:
        q = torch.nn.functional.pad(q, (0, vocab_size - q.shape[1]))
    return ids, q


def _check_read(p, q, draft, target, start):
    """Laws that a GPU made are looked at when they have been waited for (``Sampling.probabilities``)."""
    for rows, who in (
        (p, f"target model {_name(target)}"),
        (q, f"draft model {_name(getattr(draft, 'model', draft))}"),
    ):
        bad = rows[:, 0].isnan().tolist()
        if any(bad):
            raise FloatingPointError(
                f"{who}: the logits at position {start + bad.index(True)} hold NaN, +inf or nothing but -inf"
            )


def _ids(ids, target, what, empty=False) -> list[int]:
    if isinstance(ids, torch.Tensor):
        if ids.ndim != 1:
            raise ValueError(
                f"{what} must be one sequence of ids (batch size one), not a tensor of shape {tuple(ids.shape)}"
            )
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"{what} must be ints, not {ids.dtype}")
        ids = ids.tolist()
    if isinstance(ids, str):
        raise TypeError(f"{what} must be token ids; tokenise the text first")
    ids = list(ids)
    if ids and getattr(ids[0], "ndim", isinstance(ids[0], (list, tuple))):
        raise ValueError(f"{what} must be one sequence of ids (batch size one), not a sequence of sequences")
    try:
        ids = [operator.index(i) for i in ids]
    except TypeError:
        raise TypeError(f"{what} must be ints, not {ids[:5]!r}") from None
    if not ids and not empty:
        raise ValueError(f"{what} is empty: at least one id is needed, such as a BOS token")
    bad = next((i for i in ids if not 0 <= i < target.vocab_size), None)
    if bad is not None:
        raise ValueError(f"{what} holds id {bad}; the target knows ids 0 to {target.vocab_size - 1}")
    return ids


def _count(value, what) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{what} must be an int >= 0, not {value!r}")
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"{what} must be >= 0, not {value}")
    return value


def _check_sampling(sampling) -> None:
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a specdec.Sampling, not {sampling!r}")


def _end_ids(eos) -> frozenset[int]:
    if eos is None:
        return frozenset()
    try:
        return frozenset([operator.index(eos)])
    except TypeError:  # several: arrays too, which have __index__ but no index
        pass
    try:
        return frozenset(map(operator.index, eos))
    except TypeError:
        raise TypeError(f"eos must be an id, several ids, or None, not {eos!r}") from None
