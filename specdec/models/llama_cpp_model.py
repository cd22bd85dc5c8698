"""llama.cpp behind the same interface: quantised weights as they are in the file, full rows of logits, rollback.

The low-level functions of llama-cpp-python are used, since its classes keep a loop of their own.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import torch

CONTEXT = 4096  # positions for which a cache is set aside
_silence = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C holds a pointer to it


class _Weights:
    """A file's weights, freed when no context uses them any more."""

    def __init__(self, path, gpu):
        llama_cpp.llama_log_set(_silence, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1 if gpu else 0
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ValueError(f"llama.cpp cannot read {path}")
        weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)


def requantise(source: str | Path, target: str | Path) -> None:
    """Write a GGUF file with every matrix of another in Q4_0.

    It is small, and llama.cpp re-orders its rows when it loads the file, for kernels that are fast for few tokens too.
    Every matrix, since the head of a small model is a quarter of what a pass reads.

    Raises:
        ValueError: llama.cpp cannot read ``source`` or cannot write ``target``.
    """
    llama_cpp.llama_log_set(_silence, ctypes.c_void_p())
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.pure, params.allow_requantize, params.nthread = True, True, torch.get_num_threads()
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise ValueError(f"llama.cpp cannot make {target} of {source}")


def _close(context, weights):
    """Free a context; ``weights`` are only held until then."""
    llama_cpp.llama_free(context)


class LlamaCppModel:
    """A GGUF file run by llama.cpp, on as many threads as torch has.

    The cache holds one sequence. :meth:`logits` appends to it, :meth:`drop_last` takes back.

    Args:
        path: the GGUF file.
        tokenizer: its tokenizer, if texts are to be read, or a pair's vocabularies compared.
        name: what error messages and records call it.
        max_context: positions to set aside, at most those that the model was made for.
        gpu: whether the layers run on the device that llama.cpp was built for (Metal, CUDA).

    Attributes:
        vocab_size: rows of the head, V; max_context; eos: all ids at which a text of this model ends; length: ids in the
        cache; device: where the logits are, the CPU; path: the file.

    Raises:
        ValueError: a file that llama.cpp cannot read, or a model whose state cannot be rolled back.
    """

    device = torch.device("cpu")

    def __init__(
        self, path: str | Path, tokenizer=None, name: str | None = None, max_context: int = CONTEXT, gpu: bool = False
    ):
        self.name, self.tokenizer = name or Path(path).stem, tokenizer
        self.path, self._weights = Path(path), _Weights(path, gpu)
        model = self._weights.pointer
        if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
            raise ValueError(
                f"{self.name} keeps a recurrent state, which cannot be rolled back after a rejected draft token"
            )
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.max_context = min(max_context, llama_cpp.llama_model_n_ctx_train(model))
        ends = {i for i in range(self.vocab_size) if llama_cpp.llama_vocab_is_eog(vocabulary, i)}
        if getattr(tokenizer, "eos_token_id", None) is not None:
            ends.add(tokenizer.eos_token_id)
        self.eos = tuple(sorted(ends))
        self._open()

    def _open(self):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.max_context
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.swa_full = True  # a sliding cache forgets what a rollback needs
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._weights.pointer, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context of {self.max_context} ids for {self.name}")
        weakref.finalize(self, _close, self._context, self._weights)
        self.length = 0

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Append n ids to the cache; (n, V) float32, row i predicts what follows ids[i]."""
        parts = [self._forward(part, rows=True) for part in self._parts(ids)]
        return torch.cat(parts) if parts else torch.empty(0, self.vocab_size)

    def prefill(self, ids: Sequence[int]) -> None:
        """Append ids to the cache without computing their logits."""
        for part in self._parts(ids):
            self._forward(part, rows=False)

    def drop_last(self, n: int) -> None:
        """Take the last n ids back out of the cache.

        Raises:
            ValueError: n is negative or more than the cache holds.
        """
        if not 0 <= n <= self.length:
            raise ValueError(f"cannot drop {n} ids from a cache that holds {self.length}")
        if n and not llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, self.length - n, -1):
            raise ValueError(f"{self.name}: its cache cannot be rolled back")
        self.length -= n

    def twin(self) -> LlamaCppModel:
        """The same weights with an empty cache of its own."""
        other = object.__new__(LlamaCppModel)
        other.__dict__.update(self.__dict__)
        other._open()
        return other

    def _parts(self, ids):
        if self.length + len(ids) > self.max_context:
            raise ValueError(
                f"{self.name}: {self.length} + {len(ids)} ids do not fit its context of {self.max_context}"
            )
        return [ids[at : at + _BATCH] for at in range(0, len(ids), _BATCH)]

    def _forward(self, ids, rows):
        n = len(ids)
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i] = token, self.length + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = rows
            failed = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"{self.name}: llama.cpp failed to decode ({failed})")
        self.length += n
        if not rows:
            return None
        found = llama_cpp.llama_get_logits(self._context)  # overwritten by the next pass
        return torch.from_numpy(np.ctypeslib.as_array(found, (n, self.vocab_size)).copy())


_BATCH = 512  # ids of one pass at most
