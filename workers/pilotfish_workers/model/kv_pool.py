"""The tensors of the paged KV pool: one slot a token, block after block."""

from dataclasses import dataclass

import torch

from pilotfish_workers.model.errors import ModelError

__all__ = ["KvPool", "KvShape", "token_bytes"]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer stores for one token."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        """Numbers a token, keys and values together."""
        return self.num_heads * (self.key_dim + self.value_dim)


class KvPool:
    """Keys and values of every layer, `[num_slots + 1, num_heads, dim]` each.

    Token p of a sequence lies in slot `blocks[p // block_size] * block_size + p % block_size`.
    One slot more, `zero_slot`, stays zero: what pads a ragged gather must be finite, since a
    masked position still meets its value multiplied by zero, and zero times NaN is NaN.
    """

    def __init__(
        self,
        shapes: list[KvShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = shapes
        self.zero_slot = num_slots
        try:
            self.keys = [
                torch.zeros(num_slots + 1, s.num_heads, s.key_dim, dtype=dtype, device=device)
                for s in shapes
            ]
            self.values = [
                torch.zeros(num_slots + 1, s.num_heads, s.value_dim, dtype=dtype, device=device)
                for s in shapes
            ]
        except RuntimeError as error:  # torch's way to say that memory is out, on any device
            size = num_slots * token_bytes(shapes, dtype) >> 20
            raise ModelError(
                f"a KV pool of {num_slots} tokens ({size} MiB) does not fit into the memory of "
                f"{device}: ask for fewer tokens"
            ) from error

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store `key` and `value`, `[num_tokens, num_heads, dim]`, in `slots`, int64."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


def token_bytes(shapes: list[KvShape], dtype: torch.dtype) -> int:
    """Bytes that one token takes in all layers together."""
    return sum(shape.num_values for shape in shapes) * dtype.itemsize
