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
from specdec.equivalence import one_sample_chi2
from specdec.study.toys import (  # noqa: F401
    Table,
    exact,
    fresh,
    noisy,
    random_law,
    recorded,
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
