"""Models and answers whose law is known: what planted faults are looked for on, and what the tests are calibrated on.

Torch and transformers are loaded when a model is made or run; laws and answers are numpy.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pandas as pd

from specdec.study.rows import readings

# Laws: the last axis is the next token, the axes before it the tokens it depends on


def random_law(seed: int, size: int, spread: float = 1.0, order: int = 1) -> np.ndarray:
    """(V,) * (order + 1), a softmax of normal logits; the next token depends on the last ``order``."""
    return _normalised(np.exp(spread * np.random.default_rng(seed).normal(size=(size,) * (order + 1))))


def near(law: np.ndarray, seed: int, spread: float) -> np.ndarray:
    """A draft's law: ``law`` with normal noise on its logarithms."""
    return _normalised(law * np.exp(spread * np.random.default_rng(seed).normal(size=law.shape)))


def topics(law: np.ndarray, leave: float) -> np.ndarray:
    """``law`` with two topics, the lower and the upper half of the ids; a token is of the other topic ``leave`` times as
    often as in ``law``, so that answers stick to theirs."""
    upper = np.arange(law.shape[-1]) >= law.shape[-1] // 2
    return _normalised(law * np.where(upper[:, None] == upper, 1.0, leave))


def zipf(size: int, exponent: float = 1.0) -> np.ndarray:
    """(V,), falling as 1 / rank."""
    return _normalised(np.arange(1, size + 1) ** -exponent)


def sticky(size: int, stay: float) -> np.ndarray:
    """(V, V): the last token again with chance ``stay``, else one by Zipf's law."""
    return stay * np.eye(size) + (1 - stay) * zipf(size)


def heated(law: np.ndarray, temperature: float) -> np.ndarray:
    """``law`` at another temperature."""
    return _normalised(law ** (1 / temperature))


def top(law: np.ndarray, count: int) -> np.ndarray:
    """``law`` with only the ``count`` largest of each row, renormalised."""
    return _normalised(np.where(law >= np.sort(law, -1)[..., [-count]], law, 0))


def _normalised(weights):
    return weights / weights.sum(-1, keepdims=True)


# Answers without a model


def walks(law: np.ndarray, start: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """(n, length) tokens of n answers by a law of any order, after ``start`` (n, order)."""
    order = law.ndim - 1
    ids = np.empty((len(start), order + length), dtype=int)
    ids[:, :order] = start
    cumulative = law.cumsum(-1)
    cumulative[..., -1] = 1
    for t in range(order, order + length):
        row = cumulative[tuple(ids[:, t - order : t].T)]
        ids[:, t] = (row < rng.random((len(start), 1))).sum(-1)
    return ids[:, order:]


def scored(law: np.ndarray, tokens: np.ndarray, prefixes: np.ndarray) -> pd.DataFrame:
    """The columns of ``specdec.score`` for tokens (any shape) drawn after prefixes, by the (V, V) law."""
    at = (prefixes.ravel(), tokens.ravel())
    logs = np.log(law, where=law > 0, out=np.zeros_like(law))
    entropy = -(law * logs).sum(-1)
    order = np.argsort(-law, axis=-1, kind="stable")
    cdf_rank = np.empty_like(law)
    np.put_along_axis(cdf_rank, order, np.take_along_axis(law, order, -1).cumsum(-1), -1)
    return pd.DataFrame(
        {
            "logp": np.where(law[at] > 0, logs[at], -np.inf),
            "entropy": entropy[at[0]],
            "varentropy": (law * (logs + entropy[:, None]) ** 2).sum(-1)[at[0]],
            "cdf_id": law.cumsum(-1)[at] - law[at],
            "cdf_rank": cdf_rank[at] - law[at],
            "probability": law[at],
        }
    )


def pair_laws(law: np.ndarray, start: tuple[int, int], count: int) -> list[np.ndarray]:
    """Of a law of order 2: the (V, V) joint laws of tokens (i, i + 1) of an answer after ``start``, i = 0..count - 1."""
    joint = np.zeros(law.shape[:2])
    joint[start] = 1
    found = []
    for _ in range(count + 1):
        joint = np.einsum("ab,abc->bc", joint, law)
        found.append(joint)
    return found[1:]  # the first holds the last token of the prompt


# Models


class Table:
    """A model written by a user, without transformers: the law of the next token is a row of ``law``; zeros are allowed.

    Args:
        law: (V, V), or (V, V, V) for a law that depends on the last two tokens: then a row depends on what the cache
            holds, and a cache that was rolled back wrongly shows in the answer. Id 0 stands before the first one.
    """

    def __init__(self, law, max_context: int = 10**6):
        import torch

        self.rows = torch.as_tensor(np.asarray(law)).log().float()
        self.vocab_size = len(self.rows)
        self.max_context = max_context
        self.eos = frozenset()
        self.ids = []

    @property
    def length(self):
        return len(self.ids)

    def logits(self, ids):
        before = self.rows.ndim - 2
        text = [*([0] * before + self.ids)[len(self.ids) :], *ids]
        self.ids += ids
        return self.rows[tuple(text[i : i + len(ids)] for i in range(before + 1))]

    def drop_last(self, n):
        del self.ids[len(self.ids) - n :]


def tiny(seed: int, config=None, vocab: int = 97, window: int = 64, **changes):
    """Two layers of random weights: nothing is known of its law, but every cached position counts.

    Args:
        config: class of a transformers configuration; Llama's if None.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    # Ten times the usual spread of weights, so that rows differ by more than rounding and greedy answers do not stick.
    settings = (
        dict(vocab_size=vocab, max_position_embeddings=window, initializer_range=0.2, **shape, **tokens) | changes
    )
    return AutoModelForCausalLM.from_config((config or LlamaConfig)(**settings)).eval()


def noisy(model, spread: float = 0.02):
    """A draft for ``model`` that is right often but not always: a copy with noise on the weights."""
    import torch

    torch.manual_seed(0)
    other = copy.deepcopy(model)
    for w in other.parameters():
        w.data += spread * torch.randn_like(w)
    return other


# Caches


def fresh(model, ids):
    """Logits of every id, by transformers alone and without a cache."""
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def rows_error(model, prompt: list[int], tokens: list[int]) -> float:
    """Of the rows from which ``tokens`` were drawn: the largest error against one pass without a cache.

    A row counts if its block began where the cache says and all it read is in the answer; each token needs one (inf
    where one has none).
    """
    text = prompt + tokens
    right = fresh(model.model, text)
    errors = {}
    for at, row in readings(model.blocks, text):
        errors[at] = max(errors.get(at, 0), float((row - right[at]).abs().max()))
    return max(errors.get(at, np.inf) for at in range(len(prompt) - 1, len(text) - 1))


def watched(kind):
    """``kind``, a ModelDraft, looking at itself after each proposal: its cache, and every q against a fresh pass.

    ``error`` is the largest difference of a q from the law of a fresh pass; inf where the cache holds anything but all
    ids before the last draft token.
    """

    class Watched(kind):
        error = 0.0

        def propose(self, context, k, sampling, generator):
            ids, q = super().propose(context, k, sampling, generator)
            if len(ids):
                text = list(context) + ids.tolist()
                logits = fresh(self.model.model, text[:-1])[-len(ids) :]
                right = sampling.probabilities(logits, [text[: len(context) + i] for i in range(len(ids))])
                held = self.model.length == len(text) - 1
                self.error = max(self.error, float((q - right).abs().max()) if held else np.inf)
            return ids, q

    return Watched


# The exact law of verification


def rows(seed: int, size: int, depth: int, zeros: float = 0.0) -> list:
    """Random laws of every prefix: a list over prefix lengths 0..depth-1 of float64 (V,) * i + (V,); some zeros."""
    import torch

    rng = np.random.default_rng(seed)
    out = []
    for i in range(depth):
        weights = rng.exponential(size=(size,) * (i + 1)) * (rng.random((size,) * (i + 1)) >= zeros)
        weights[..., rng.integers(size)] += weights.sum(-1) == 0  # no row may be empty
        out.append(torch.as_tensor(weights / weights.sum(-1, keepdims=True)))
    return out


def exact(law, p: list, q: list, rule: str) -> tuple[float, float]:
    """What one round emits, summed over every draft and every outcome of ``law``.

    Args:
        law: ``specdec.verification.law``.
        p: K + 1 and q: K tables of context-dependent laws (:func:`rows`).

    Returns:
        total variation between the joint law of the K + 1 next tokens (emitted, then extended by the target) and the
        target's own, and the expected number of draft tokens kept.
    """
    import torch

    size, count = len(p[0]), len(q)
    mass = [torch.zeros((size,) * (n + 1), dtype=torch.float64) for n in range(count + 1)]  # by the number emitted
    kept = 0.0
    for drafted in itertools.product(range(size), repeat=count):
        weight = float(np.prod([q[i][drafted[: i + 1]] for i in range(count)]))
        if weight == 0:
            continue
        p_rows = torch.stack([p[i][drafted[:i]] for i in range(count + 1)])
        q_rows = torch.stack([q[i][drafted[:i]] for i in range(count)]) if count else p_rows.new_empty(0, size)
        stop, following = law(p_rows, q_rows, torch.tensor(drafted, dtype=torch.long), rule)
        for i in range(count + 1):
            mass[i][drafted[:i]] += weight * stop[i] * following[i]
            kept += weight * i * float(stop[i])
    joint, target = mass[0], p[0]
    for i in range(1, count + 1):
        joint = joint[..., None] * p[i] + mass[i]
        target = target[..., None] * p[i]
    return float((joint - target).abs().sum()) / 2, kept
