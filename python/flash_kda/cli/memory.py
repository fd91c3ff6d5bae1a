"""A text as an associative memory's work, and the memories that ``demo`` compares.

Words have fixed random unit vectors, one as a key and one as a value in each head. The memory is
told word after word: at each step it stores "after the previous word came this one" (the previous
word's key, this word's value) and is then asked with this word's key what came after it before.
The next word is not stored until after it was asked for.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import flash_kda
from flash_kda.cases import HEAD_DIM, LOWER_BOUND
from flash_kda.cli.machine import one_thread

HEADS = 4
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")


@dataclass(frozen=True)
class Text:
    """A text as numbers of words, and their vectors."""

    words: list[str]  # the vocabulary
    ids: torch.Tensor  # [T]
    keys: torch.Tensor  # [vocabulary, heads, 128], bf16
    values: torch.Tensor

    @staticmethod
    def split(text: str) -> list[str]:
        return _WORD.findall(text.lower())

    @classmethod
    def read(cls, text: str, limit: int) -> Text:
        stream = cls.split(text)[:limit]
        numbers = {word: n for n, word in enumerate(dict.fromkeys(stream))}
        ids = torch.tensor([numbers[word] for word in stream], dtype=torch.int64)
        vectors = torch.stack([_vectors(word) for word in numbers]) if numbers else None
        if vectors is None or len(ids) < 3:
            raise ValueError(f"expected a text of at least 3 words, got {len(ids)}")
        return cls(list(numbers), ids, vectors[:, 0], vectors[:, 1])

    def pieces(self, tokens: int) -> Iterator[slice]:
        """Spans of steps. Step t stores the pair (t, t + 1) and asks what follows t + 1."""
        steps = len(self.ids) - 2
        for begin in range(0, steps, tokens):
            yield slice(begin, min(begin + tokens, steps))

    def rows(self, span: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of these steps, [1, T, heads, 128]."""
        now = slice(span.start + 1, span.stop + 1)
        q, k, v = self.keys[self.ids[now]], self.keys[self.ids[span]], self.values[self.ids[now]]
        return q[None], k[None], v[None]

    def stored(self) -> torch.Tensor:
        """For each step the word that followed the one asked with the last time, -1 if none did."""
        last: dict[int, int] = {}
        found = []
        ids = self.ids.tolist()
        for before, now in zip(ids[:-2], ids[1:-1], strict=True):
            last[before] = now
            found.append(last.get(now, -1))
        return torch.tensor(found)

    def answers(self, span: slice, out: torch.Tensor) -> torch.Tensor:
        """The word that each output [1, T, heads, 128] is nearest to, over all heads together."""
        table = self.values.to(out.device).float().flatten(1)
        return (out[0].float().flatten(1) @ table.T).argmax(-1).cpu()


def _vectors(word: str) -> torch.Tensor:
    """[key or value, heads, 128]: unit vectors that depend on the word alone."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    vectors = torch.randn(2, HEADS, HEAD_DIM, generator=generator)
    return (vectors / vectors.norm(dim=-1, keepdim=True)).bfloat16()


@dataclass(frozen=True)
class Settings:
    """How strongly a memory writes and how fast it forgets."""

    write: float  # beta, the share of a stored value that a new one replaces
    half_life: float  # tokens after which a channel has half of what it had

    @property
    def beta_logit(self) -> float:
        return _logit(self.write)

    @property
    def log_decay(self) -> float:
        return -math.log(2.0) / self.half_life

    @property
    def gate_logit(self) -> float:
        """g, before the activation lower_bound * sigmoid(g)."""
        return _logit(self.log_decay / LOWER_BOUND)


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


class DeltaMemory:
    """KDA through flash_kda: the delta rule, with the gate or without."""

    def __init__(self, settings: Settings, gate: bool, device: torch.device) -> None:
        self.settings, self.gate, self.device = settings, gate, device
        self.state = torch.zeros(1, HEADS, HEAD_DIM, HEAD_DIM, device=device)

    def arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, object]:
        """Of ``flash_kda.fwd``, which carries the state from piece to piece in place."""
        q, k, v = (tensor.to(self.device) for tensor in (q, k, v))
        return {
            "q": q,
            "k": k,
            "v": v,
            "g": torch.full_like(k, self.settings.gate_logit),
            "beta": torch.full_like(k[..., 0], self.settings.beta_logit),
            "scale": 1.0,
            "out": torch.empty_like(v),
            "lower_bound": LOWER_BOUND if self.gate else 0.0,
            "initial_state": self.state,
            "final_state": self.state,
        }

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_kda.fwd(**self.arguments(q, k, v))


class LinearMemory:
    """Linear attention: what is stored adds up, S <- S * decay + v k^T, with a gate or without.

    Chunked: inside a chunk by a product of masked scores, between chunks through the state.
    """

    CHUNK = 128

    def __init__(self, settings: Settings, gate: bool, device: torch.device) -> None:
        self.log_decay = settings.log_decay if gate else 0.0
        self.state = torch.zeros(1, HEADS, HEAD_DIM, HEAD_DIM, device=device)
        self.device = device

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.to(self.device).float().transpose(1, 2) for tensor in (q, k, v))
        parts = zip(*(tensor.split(self.CHUNK, dim=2) for tensor in (q, k, v)), strict=True)
        with one_thread():  # its products are too small to share
            return torch.cat([self._chunk(*part) for part in parts], dim=2).transpose(1, 2)

    def _chunk(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        age = torch.arange(q.shape[2], device=self.device, dtype=torch.float32)
        decay = torch.exp(self.log_decay * (age[:, None] - age)).tril()
        since_start = torch.exp(self.log_decay * (age + 1))[:, None]
        until_end = torch.exp(self.log_decay * (age[-1] - age))[:, None]
        out = (q @ k.mT * decay) @ v + since_start * (q @ self.state.mT)
        self.state = self.state * since_start[-1] + v.mT @ (k * until_end)
        return out
