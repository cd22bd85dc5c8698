"""What the tests share: models, those of ``specdec.study.toys`` among them, and the two decoders behind short names."""

import itertools
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import specdec
from specdec import drafts, verification
from specdec.equivalence import one_sample_chi2
from specdec.study.rows import recorded  # noqa: F401
from specdec.study.toys import (  # noqa: F401
    Table,
    exact,
    fresh,
    noisy,
    random_law,
    rows,
    rows_error,
    tiny,
    top,
    watched,
)

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


def words(names, **special):
    """A tokenizer of whole words: the id of a word is its place in ``names``."""
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


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
        return torch.tensor(ids[at])

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
