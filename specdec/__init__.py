"""Speculative decoding, thin enough to read, and the study that measures it.

The public names below are loaded when first used, so that ``import specdec`` needs neither torch nor transformers:
the published book is rendered without them.
"""

from importlib import import_module

from specdec.sampling import Sampling

__version__ = "0.1.0"

_HOME = {
    "AdaptiveK": "specdec.costmodel",
    "Costs": "specdec.costmodel",
    "TorchModel": "specdec.models.torch_model",
    "load": "specdec.models.loading",
    "ModelDraft": "specdec.drafts",
    "PromptLookup": "specdec.drafts",
    "autoregressive": "specdec.decoding",
    "speculative": "specdec.decoding",
    "score": "specdec.decoding",
    "Round": "specdec.decoding",
    "Decoded": "specdec.decoding",
}
_MODULES = (
    "sampling",
    "verification",
    "drafts",
    "decoding",
    "models",
    "devices",
    "latency",
    "costmodel",
    "equivalence",
    "study",
)

__all__ = ["Sampling", *_HOME, *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"specdec.{name}")
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__():
    return sorted(set(globals()) | set(__all__))
