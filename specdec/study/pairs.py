"""From a configuration to a target and a draft that are ready to run. Torch is loaded here, when asked."""

from __future__ import annotations

import itertools

from specdec.study.configurations import Configuration

_LLAMA_CPP = {"gguf": "dense", "q4_0": "q4_0"}  # forms of weights that llama.cpp runs, and what specdec.load calls them


def unavailable(configuration: Configuration) -> str | None:
    """Why ``configuration`` cannot run on this machine; None if it can."""
    import torch

    from specdec.models import loading, packing, weights

    if configuration.device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device here"
    if configuration.device == "mps" and not torch.backends.mps.is_available():
        return "no Apple GPU (MPS) here"
    missing = {"int8": packing.int8_missing, "dense": lambda device: None}
    missing |= dict.fromkeys(_LLAMA_CPP, loading.llama_cpp_missing)
    reasons = (missing[form](configuration.device) for form in sorted(configuration.formats()))
    known = weights.manifest()  # a folder or a repository of the hub is looked for when it is loaded
    absent = (weights.missing(name) for name in configuration.weights() if name in known)
    return next(filter(None, itertools.chain(reasons, absent)), None)  # in order: the hub is asked last


def build(configuration: Configuration):
    """(target, draft) on the configuration's device. Downloads and converts weights the first time."""
    target = load_target(configuration)
    return target, load_draft(configuration, target)


def load_target(configuration: Configuration):
    """The target of :func:`build`."""
    return _load(configuration, configuration.target, configuration.format)


def load_draft(configuration: Configuration, target):
    """The draft of :func:`build`; ``target`` is what drafts from its own first layers are made of."""
    import specdec
    from specdec.drafts import first_layers

    source = configuration.draft
    if source.kind == "prompt-lookup":
        return specdec.PromptLookup(source.max_ngram)
    if source.kind == "first-layers":
        return specdec.ModelDraft(first_layers(target, source.layers))
    return specdec.ModelDraft(_load(configuration, source.weights, source.format))


def dense_target(configuration: Configuration):
    """The target with dense weights where the configuration's are not; None where they are."""
    return None if configuration.format == "dense" else _load(configuration, configuration.target, "dense")


def tokenizer(configuration: Configuration):
    """The tokenizer of the target, without its weights."""
    from specdec.models import loading

    return loading.tokenizer(configuration.target)


def _load(configuration, name, form):
    import specdec

    how = {"backend": "llama.cpp", "weights": _LLAMA_CPP[form]} if form in _LLAMA_CPP else {"weights": form}
    return specdec.load(name, device=configuration.device, dtype=configuration.dtype, **how)


def prompt_ids(tokenizer, text: str) -> list[int]:
    """The ids of one user turn under the model's chat template, made once and used by every method.

    The template writes its own start token, so none is added.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: the prompts are written for instruction-tuned models")
    turn = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return tokenizer(chat, add_special_tokens=False)["input_ids"]


def weight_bytes(model) -> int:
    """Bytes of weights that one forward pass of a few tokens reads: all but the rows of an embedding table of its own."""
    if hasattr(model, "path"):
        return _file_bytes(model.path)
    hf = model.model
    table, head = hf.get_input_embeddings().weight, hf.get_output_embeddings()
    size = sum(p.nbytes for p in hf.parameters()) + sum(getattr(m, "packed_bytes", 0) for m in hf.modules())
    tied = getattr(head, "weight", None) is not None and head.weight.data_ptr() == table.data_ptr()
    return size if tied else size - table.nbytes


def _file_bytes(path):
    import gguf

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    return sum(sizes.values()) - ("output.weight" in sizes) * sizes["token_embd.weight"]
