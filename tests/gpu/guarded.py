"""Device memory between guard zones that nothing may write."""

from __future__ import annotations

from dataclasses import replace

import flash_kda
import torch
from flash_kda.cases import Inputs

GUARD_BYTES = 4096
PATTERN = 0xA5


class GuardedMemory:
    def __init__(self) -> None:
        self._zones: list[torch.Tensor] = []

    def like(self, tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
        """A tensor of that shape and dtype, full of NaN or of `tensor`."""
        size = tensor.numel() * tensor.element_size()
        memory = torch.full(
            (size + 2 * GUARD_BYTES,), PATTERN, dtype=torch.uint8, device=tensor.device
        )
        self._zones += [memory[:GUARD_BYTES], memory[GUARD_BYTES + size :]]
        inner = memory[GUARD_BYTES : GUARD_BYTES + size].fill_(0xFF)
        inner = inner.view(tensor.dtype).view(tensor.shape)
        return inner.copy_(tensor) if copy else inner

    def workspace(self, inputs: Inputs) -> torch.Tensor:
        """Exactly as much as get_workspace_size says."""
        batch, tokens, heads = inputs.q.shape[:3]
        sequences = batch if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
        size = flash_kda.get_workspace_size(batch * tokens, heads, sequences)
        return self.like(torch.empty(size, dtype=torch.uint8, device=inputs.q.device))

    def call(self, inputs: Inputs) -> Inputs:
        """The same call with every tensor, the outputs too, in memory of its own."""
        moved = {
            name: self.like(tensor, copy=name not in ("out", "final_state"))
            for name, tensor in vars(inputs).items()
            if torch.is_tensor(tensor)
        }
        return replace(inputs, **moved)

    def check(self) -> None:
        for zone in self._zones:
            assert (zone == PATTERN).all(), "written outside of the arguments"
