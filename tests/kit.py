"""What the tests share: models whose law is known, the two decoders behind short names, the exact law of verification."""

import copy
import importlib.util
import itertools
import types
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import specdec
from specdec import drafts, verification
from specdec.equivalence import one_sample_chi2

GREEDY = specdec.Sampling(temperature=0)


# Models


def markov_llama(law, eos=None) -> LlamaForCausalLM:
    """A Llama whose next-token law is exactly ``law[last token]``: (V, V), all > 0, V a multiple of 4.

    Attention and MLP add nothing, one-hot embeddings pass the norm as sqrt(V) times themselves, and the head holds the
    logarithms. Its cache fills and must be rolled back like any other, but faults in it do not show: see ``tiny``.
    """
    law = torch.as_tensor(law, dtype=torch.float64)
    size = len(law)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(law.log().T / size**0.5)
    return model


def tiny(seed, config=LlamaConfig, vocab=97, window=64, **changes) -> PreTrainedModel:
    """Two layers of random weights: nothing is known of its law, but every cached position counts."""
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
    return AutoModelForCausalLM.from_config(config(**settings)).eval()


def noisy(model, spread=0.02):
    """A draft for ``model`` that is right often but not always: a copy with noise on the weights."""
    torch.manual_seed(0)
    other = copy.deepcopy(model)
    for w in other.parameters():
        w.data += spread * torch.randn_like(w)
    return other


def words(names, **special):
    """A tokenizer of whole words: the id of a word is its place in ``names``."""
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


class Table:
    """A model written by a user, without transformers: the law of the next token is a row of ``law``; zeros are allowed."""

    def __init__(self, law, max_context=10**6):
        self.rows = torch.as_tensor(np.asarray(law)).log().float()
        self.vocab_size = len(self.rows)
        self.max_context = max_context
        self.eos = frozenset()
        self.ids = []

    @property
    def length(self):
        return len(self.ids)

    def logits(self, ids):
        self.ids += ids
        return self.rows[list(ids)]

    def drop_last(self, n):
        del self.ids[len(self.ids) - n :]


class Prefixes(Table):
    """A Table whose every row depends on the whole cache, so that a cache that is off shows in the law; float64.

    Args:
        seed, zeros: of the random laws, one for each prefix, and the share of ids each of them bars.
    """

    def __init__(self, seed, size, zeros=0.0, max_context=10**6, dtype=torch.float64):
        super().__init__(np.eye(size), max_context)
        self.seed, self.zeros, self.dtype = seed, zeros, dtype
        self.known = {}

    def law(self, prefix):
        """(V,) of ``prefix``, a tuple of ids."""
        if prefix not in self.known:
            rng = np.random.default_rng([self.seed, *prefix])
            weights = rng.exponential(size=self.vocab_size) * (rng.random(self.vocab_size) >= self.zeros)
            weights[rng.integers(self.vocab_size)] += not weights.any()
            self.known[prefix] = torch.as_tensor(weights / weights.sum())
        return self.known[prefix]

    def logits(self, ids):
        end = len(self.ids) + 1
        self.ids += ids
        laws = [self.law(tuple(self.ids[: end + i])) for i in range(len(ids))]
        return torch.stack(laws).log().to(self.dtype) if laws else torch.empty(0, self.vocab_size)


def chain(size, path, eps=1e-6):
    """(V, V): path[i] is followed by path[i + 1] but for eps a token; after any other token all are equally likely."""
    law = np.full((size, size), 1 / size)
    for here, following in itertools.pairwise(path):
        law[here] = eps
        law[here, following] = 1 - eps * (size - 1)
    return law


def random_law(seed, size, spread=1.0):
    """(V, V), a softmax of normal logits."""
    weights = np.exp(spread * np.random.default_rng(seed).normal(size=(size, size)))
    return weights / weights.sum(-1, keepdims=True)


def top(law, count):
    """``law`` with only the ``count`` largest of each row, renormalised."""
    kept = np.where(law >= np.sort(law, -1)[:, [-count]], law, 0)
    return kept / kept.sum(-1, keepdims=True)


@contextmanager
def positions(model):
    """Collects the largest position of every forward pass of a transformers model."""
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: seen.append(int(given["position_ids"].max())), with_kwargs=True
    )
    yield seen
    hook.remove()


# Decoders


def model(given):
    return specdec.TorchModel(given) if isinstance(given, PreTrainedModel) else given


def draft(given):
    """A draft as it is; of a model, the ModelDraft."""
    return given if given is None or hasattr(given, "propose") else specdec.ModelDraft(model(given))


def _sampling(T, options):
    names = {f.name for f in fields(specdec.Sampling)}
    return specdec.Sampling(temperature=T, **{name: options.pop(name) for name in names & options.keys()})


def G(target, drafter, ids, K, max_new, T=1.0, seed=0, eos=None, **options):
    """Speculative decoding of models or drafts of any kind: (tokens, the whole answer). Filters by their names."""
    out = specdec.speculative(
        model(target), draft(drafter), ids, K, max_new, sampling=_sampling(T, options), seed=seed, eos=eos, **options
    )
    return out.tokens, out


def AR(target, ids, max_new, T=1.0, seed=0, eos=None, **filters):
    """Target-only decoding: the tokens."""
    return specdec.autoregressive(model(target), ids, max_new, _sampling(T, filters), seed, eos).tokens


def pair_pvalue(answers, law, start, at):
    """p-value of tokens ``at`` and ``at + 1``, one pair from each independent answer, under the Markov chain ``law``."""
    counts = np.zeros(law.shape)
    for tokens in answers:
        counts[tokens[at], tokens[at + 1]] += 1
    marginal = np.linalg.matrix_power(law, at)[start] @ law if at else law[start]
    return one_sample_chi2(counts.ravel(), (marginal[:, None] * law).ravel()).pvalue


# Caches


class Recorded(specdec.TorchModel):
    """A model that keeps every row of logits it gives, with where its block began."""

    def __init__(self, *given):
        super().__init__(*given)
        self.blocks = []

    def logits(self, ids):
        start, rows = self.length, super().logits(ids)
        self.blocks.append((start, list(ids), rows))
        return rows


def fresh(model, ids):
    """Logits of every id, by transformers alone and without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def rows_error(model, prompt, tokens):
    """Of the rows from which ``tokens`` were drawn: the largest error against one pass without a cache.

    A row counts if its block began where the cache says and all it read is in the answer; each token needs one.
    """
    text = prompt + tokens
    right = fresh(model.model, text)
    errors = {}
    for start, ids, rows in model.blocks:
        for i, row in enumerate(rows):
            if text[start : start + i + 1] == ids[: i + 1]:
                errors[start + i] = max(errors.get(start + i, 0), float((row - right[start + i]).abs().max()))
    return max(errors.get(at, np.inf) for at in range(len(prompt) - 1, len(text) - 1))


def watched(kind):
    """``kind``, a ModelDraft, looking at itself after each proposal: its cache, and every q against a fresh pass."""

    class Watched(kind):
        def propose(self, context, k, sampling, generator):
            ids, q = super().propose(context, k, sampling, generator)
            if len(ids):
                text = list(context) + ids.tolist()
                assert self.model.length == len(text) - 1, "the cache holds all but the last draft token"
                logits = fresh(self.model.model, text[:-1])[-len(ids) :]
                right = sampling.probabilities(logits, [text[: len(context) + i] for i in range(len(ids))])
                assert torch.allclose(q, right, atol=1e-5, rtol=1e-4), "q is not the law of a fresh pass"
            return ids, q

    return Watched


# The exact law of verification


def rows(seed, size, depth, zeros=0.0):
    """Random laws of every prefix: a list over prefix lengths 0..depth-1 of float64 (V,) * i + (V,); some zeros."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(depth):
        weights = rng.exponential(size=(size,) * (i + 1)) * (rng.random((size,) * (i + 1)) >= zeros)
        weights[..., rng.integers(size)] += weights.sum(-1) == 0  # no row may be empty
        out.append(torch.as_tensor(weights / weights.sum(-1, keepdims=True)))
    return out


def exact(law, p, q, rule):
    """What one round emits, summed over every draft and every outcome of ``law``.

    Args:
        p: K + 1 and q: K tables of context-dependent laws (``rows``).

    Returns:
        total variation between the joint law of the K + 1 next tokens (emitted, then extended by the target) and the
        target's own, and the expected number of draft tokens kept.
    """
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


# The exact law of the loop


def every_outcome(monkeypatch, call):
    """Run ``call()`` once for every sequence of draws that is possible; pairs of its result and the probability of these draws.

    ``draw`` is replaced where the package takes it from; a draw of probability 0 is not followed, as it never comes out.
    """
    script = []  # which of its possible ids each draw gives; the first after the last of these

    def draw(probabilities, generator):
        law = probabilities.double() / probabilities.double().sum()
        ids = law.nonzero()[:, 0].tolist()
        at = script[len(taken)] if len(taken) < len(script) else 0
        taken.append((at, len(ids), float(law[ids[at]])))
        return ids[at]

    for module in (drafts, verification):
        monkeypatch.setattr(module, "draw", draw)
    found = []
    while script is not None:
        taken = []
        result = call()
        found.append((result, float(np.prod([p for _, _, p in taken]))))
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        script = [at for at, _, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None
    return found


def planted(name, old, new):
    """The module ``name`` with one fault: its shipped source, the text ``old`` (which must occur once) replaced."""
    source = Path(importlib.util.find_spec(name).origin).read_text()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}: the patch no longer applies"
    module = types.ModuleType(name)
    source = compile(source.replace(old, new), f"{name} with a planted fault", "exec")
    exec(source, module.__dict__)  # noqa: S102
    return module
