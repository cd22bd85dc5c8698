"""From a name to a model that is ready to decode."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.models import packing
from specdec.models import weights as files
from specdec.models.static_model import StaticModel
from specdec.models.torch_model import TorchModel

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(
    name: str | Path, backend: str = "torch", device: str = "auto", dtype: str = "bfloat16", weights: str = "dense"
) -> TorchModel:
    """Load a model and its tokenizer; the result has ``.name`` and ``.tokenizer``.

    Args:
        name: a name of ``data/weights.yml`` (fetched and converted the first time, verified every time), the path of a
            local folder in transformers' layout, or a repository of the model hub (``owner/model``).
        backend: "torch", or "llama.cpp" for the manifest's GGUF file as it is, with ``llama-cpp-python``.
        device: "auto" (CUDA, else MPS, else the CPU) or a torch device such as "cuda:1".
        dtype: "bfloat16", "float16" or "float32"; the manifest's weights are bfloat16, float32 is them up-cast.
        weights: "dense", or "int8": 8-bit weights and activations (``specdec.models.packing``), on a CPU only; with
            llama.cpp "dense" is the file as it is, and "q4_0" what :func:`specdec.models.weights.requantised` makes of it.

    On an NVIDIA GPU the model is a :class:`~specdec.models.static_model.StaticModel` where it can be one: faster, and with
    room for 4,096 ids; ``specdec.TorchModel`` takes a model that needs more.

    With llama.cpp ``dtype`` says nothing, and ``device`` is the CPU or what the library was built for; "auto" takes the
    latter where there is one.

    Raises:
        ValueError: a value that is not offered, a device that is not there, or a name that is none of the three kinds.
        specdec.models.weights.WeightsUnavailable: no source has the weights.
    """
    _check("backend", backend, ("torch", "llama.cpp"))
    _check("dtype", dtype, tuple(_DTYPES))
    if backend == "llama.cpp":
        return _llama_cpp(name, device, weights)
    _check("weights", weights, ("dense", "int8"))
    place = _device(device)
    if weights == "int8" and (missing := packing.int8_missing(place.type)):
        raise ValueError(f"weights='int8' is not available: {missing}")
    folder = _locate(name)
    # Reading a folder takes seconds; a download from the hub may take an hour, and keeps its bar.
    with files.without_bars() if isinstance(folder, Path) else nullcontext():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype])
    model.requires_grad_(False)
    loaded = _wrapped(model.to(place), tokenizer, str(name))
    if weights == "int8":
        packing.pack(model, packing.Int8Linear)
    elif place.type == "cpu" and (layer := packing.dense_layer(model.dtype)):
        packing.pack(model, layer)
    return loaded


def _wrapped(model, tokenizer, name):
    """On an NVIDIA GPU with passes of fixed shape, where the model has them."""
    if model.device.type == "cuda":
        with suppress(ValueError):
            return StaticModel(model, tokenizer, name)
    return TorchModel(model, tokenizer, name)


def llama_cpp_missing(device: str = "cpu") -> str | None:
    """Why llama.cpp cannot be used on a ``device`` of this machine; None if it can."""
    if not importlib.util.find_spec("llama_cpp"):
        return "llama-cpp-python is not installed (`make llama` builds it, where there is a compiler)"
    if device in ("cpu", "auto"):
        return None
    import llama_cpp

    return None if llama_cpp.llama_supports_gpu_offload() else f"llama-cpp-python was not built for {device}"


def _llama_cpp(name, device, weights):
    _check("device", device, ("auto", "cpu", "mps", "cuda"))
    _check("weights", weights, ("dense", "q4_0"))
    if name not in files.manifest():
        raise ValueError(f"backend='llama.cpp' runs the files of data/weights.yml, and {str(name)!r} is none of them")
    if missing := llama_cpp_missing(device):
        raise ValueError(f"backend='llama.cpp' is not available: {missing}")
    from specdec.models.llama_cpp_model import LlamaCppModel

    path = files.requantised(name) if weights == "q4_0" else files.fetch(name)
    return LlamaCppModel(path, tokenizer(name), str(name), gpu=device != "cpu")


def tokenizer(name: str):
    """The tokenizer of a model of ``data/weights.yml``, without its weights."""
    with files.without_bars():
        return AutoTokenizer.from_pretrained(files.converted(name))


def _check(what: str, value: str, offered: tuple[str, ...]) -> None:
    if value not in offered:
        raise ValueError(f"{what}={value!r} is not offered; only {', '.join(map(repr, offered))}")


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}") from error
    there = {
        "cpu": True,
        "mps": torch.backends.mps.is_available(),
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
    }
    if not there.get(device.type, False):
        raise ValueError(f"device {name!r} is not available on this machine")
    return device


def _locate(name: str | Path) -> str | Path:
    """What transformers should load: a folder, or a repository of the hub."""
    known = files.manifest()
    if name in known:
        return files.converted(name)
    if Path(name).is_dir():
        return Path(name)
    if str(name).count("/") == 1 and not str(name).startswith(("/", ".", "~")):
        return str(name)
    raise ValueError(f"{str(name)!r} is no folder, no hub repository and none of {', '.join(known)}")
