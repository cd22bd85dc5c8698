"""Linear layers laid out once for a CPU's matrix kernels.

Decoding reads every weight for each pass and does little with it, so a pass over a few tokens can be as fast as memory is
read, if the kernel finds the weights in the order in which it wants them. torch's own linear layer re-orders them in
every call, which costs as much as the product itself.
"""

from __future__ import annotations

import platform
import warnings

import torch
from torch import nn

_X86 = platform.machine().lower() in {"x86_64", "amd64"}
# Rows up to which torch's bfloat16 without instructions for it is faster, and outputs up-cast at a time: they stay in cache.
_FEW, _PIECE = 8, 512
# The rows that weights are packed for. With AVX-512, oneDNN's kernels for one and two rows are slower than the one for
# four, and passes of fewer are filled up with zeros; without, one row is faster as it is (1.5B float32: 0.47 s, not 0.63).
_ROWS = 4
_FILLED = _ROWS if torch.cpu._is_avx512_supported() else 1


class PackedLinear(nn.Module):
    """A linear layer with its weights in oneDNN's own order; same dtype, same result up to rounding.

    Args:
        linear: the layer to take over, in bfloat16 or float32 on the CPU.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed_bytes = linear.weight.nbytes
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features); a row of the result depends on its own row only."""
        rows = x.reshape(-1, self.in_features)
        filled = nn.functional.pad(rows, (0, 0, 0, _FILLED - len(rows))) if len(rows) < _FILLED else rows
        out = torch.ops.mkldnn._linear_pointwise(filled, self.packed, self.bias, "none", [], "")
        return out[: len(rows)].reshape(*x.shape[:-1], self.out_features)


class UpcastLinear(nn.Module):
    """A linear layer whose bfloat16 weights become float32, piece by piece, for passes of many rows.

    Without bfloat16 instructions torch takes row after row, each at the price of reading all weights: good for one row,
    minutes for a prompt.

    Args:
        linear: the layer to take over, in bfloat16 on the CPU.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias  # the very ones: a head may share them with the embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features); a row of the result depends on its own row only."""
        if x.numel() <= _FEW * self.in_features:
            return nn.functional.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features).float()
        out = torch.cat([rows @ piece.float().t() for piece in self.weight.split(_PIECE)], dim=1)
        out = out if self.bias is None else out.add_(self.bias)
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights (one scale an output) and 8-bit activations (one scale a token).

    The scale of a token comes from that token alone: with one for the whole block, as torch's dynamic quantisation takes
    it, a row would depend on the tokens after it, and a model that does may draft but not be a target.

    Args:
        linear: the layer to take over, on the CPU.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).double().clamp_min(1e-12) / 127
        # This way of quantising will go, says torch; the kernel takes its weights in no other form.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            weight = torch.quantize_per_channel(weight, scale, torch.zeros(len(scale)).long(), 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(weight, None)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())
        # Without VNNI the kernel adds pairs of products in 16 bits: activations of 7 bits keep them from overflowing.
        self.levels = 127 if torch.cpu._is_vnni_supported() else 63
        self.packed_bytes = linear.weight.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features); a row of the result depends on its own row only."""
        rows = x.float()
        scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / self.levels
        # Already whole numbers: the kernel's own quantisation, with one scale for all, leaves them as they are.
        whole = (rows / scale).round_()
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            whole, 1.0, self.levels + 1, self.packed
        )
        out = out.mul_(scale) if self.bias is None else torch.addcmul(self.bias, out, scale)
        return out.to(x.dtype)


def pack(model: nn.Module, kind: type[nn.Module]) -> None:
    """Put a ``kind`` in the place of every linear layer of ``model``, one after the other: at no time are all there twice."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, kind(child))


def dense_layer(dtype: torch.dtype) -> type[nn.Module] | None:
    """The linear layer for dense weights of ``dtype`` on this CPU; None for torch's own. Others only where seen to be faster."""
    if not (_X86 and torch.backends.mkldnn.is_available()) or dtype not in (torch.float32, torch.bfloat16):
        return None
    fast = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return PackedLinear if fast else UpcastLinear


def int8_missing(device: str = "cpu") -> str | None:
    """Why 8-bit weights cannot be used on a ``device`` of this machine; None if they can."""
    if device != "cpu":
        return f"8-bit weights run on a CPU, not on {device}"
    if _X86 and "fbgemm" in torch.backends.quantized.supported_engines:
        return None
    return "torch has 8-bit kernels for x86 only"
