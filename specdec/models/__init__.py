"""Causal language models with a cache that can be rolled back, and where their weights come from.

A *model* is any object with these members; batch size is one, and users can write their own:

``vocab_size``
    int, the number V of columns of a row of logits.
``max_context``
    int, the most tokens the model can hold.
``eos``
    tuple of int, every id that ends an answer: the union of what the model's configs and its tokenizer say.
``length``
    int, the number of tokens now in the cache.
``logits(ids)``
    appends the n ids to the cache; gives a float32 tensor (n, V), row i the logits of the token that follows id i.
    A row depends on nothing after it.
``drop_last(n)``
    forgets the last n tokens of the cache.

The modules: ``torch_model`` (transformers models on CUDA, MPS or CPU) with ``packing`` (its weights laid out for a CPU),
``llama_cpp_model`` (GGUF files as they are), ``loading`` (from a name to a model) and ``weights`` (files known by their
SHA-256, fetched and converted once).
"""
