"""All that differs between devices: when work is done, how it is timed, how it is launched.

A CPU has done what it was asked when a call comes back. A GPU is only told to: a round of speculative decoding hands it
all passes, laws and draws one after the other and waits once, for the tokens. Not run on a GPU yet: so far only the
CPU's half of each function has run, and the tests put a stand-in for the GPU behind the other half.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch


def is_gpu(device: torch.device | str | None) -> bool:
    """Whether the device works on while the CPU goes on, and is one that this package knows how to time: CUDA, MPS."""
    return _kind(device) in ("cuda", "mps")


def synchronise(device: torch.device | str | None) -> None:
    """Wait until the device has done all it was asked to; nothing to wait for on a CPU."""
    kind = _kind(device)
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def mark(device: torch.device | str | None) -> Any:
    """This point of the device's work, for :func:`seconds_between`; nothing is waited for.

    A GPU notes the time when it gets there; for a CPU, which is there, it is the time itself.
    """
    if not is_gpu(device):
        return time.perf_counter()
    if _kind(device) == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    else:
        event = torch.mps.event.Event(enable_timing=True)
        event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds from one mark to a later one of the same device, which has got there: read after the device was waited for."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000


def send(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """``tensor`` on the device. Sending to a GPU waits for nothing; reading from one does, since the CPU uses it at once."""
    return tensor.to(device or "cpu", non_blocking=is_gpu(device))


def rows(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """``model.logits(ids)``; of a transformers model on a GPU the rows stay there and are not waited for."""
    stay = hasattr(model, "rows") and is_gpu(getattr(model, "device", None))
    return model.rows(ids) if stay else model.logits(ids.tolist())


def captured(run: Callable[[], torch.Tensor], device: torch.device, what: str) -> Callable[[], torch.Tensor]:
    """``run`` as one launch: its kernels are recorded once as a CUDA graph, and replayed by each call.

    A pass of a small model is several hundred kernels, and launching each costs more than running it. What is replayed
    reads and writes the tensors that ``run`` used, so new input is copied into these, and each result lies where the
    last one was. Other devices have no graphs: there, and where recording fails (with a warning), it is ``run`` itself.

    Args:
        what: what the warning calls it.
    """
    if _kind(device) != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(device):
            here, apart = torch.cuda.current_stream(), torch.cuda.Stream()
            apart.wait_stream(here)
            with torch.cuda.stream(apart):  # warm up apart: libraries set aside their memory in the first calls
                for _ in range(2):
                    run()
            here.wait_stream(apart)
            with torch.cuda.graph(graph):
                result = run()
    except RuntimeError as error:
        warnings.warn(
            f"{what} cannot be recorded as a CUDA graph, each of its kernels is launched: {error}", stacklevel=2
        )
        return run

    def replay():
        graph.replay()
        return result

    return replay


def _kind(device):
    return torch.device(device).type if device is not None else "cpu"
