"""The list of forward calls that tests, ``check`` and ``bench`` run, and their inputs.

A case file is text, one case a line, ``#`` starts a comment. Six columns and an optional seventh,
separated by blanks::

    name  tokens  heads  inputs  initial_state  final_state  [tags]

* tokens: ``BxT`` for B sequences of T tokens; otherwise the lengths of sequences that lie one
  after the other and are told apart by cu_seqlens, separated by commas. ``N*L`` stands for N
  lengths L, and ``+P`` at the end for P more rows of the tensors that belong to no sequence.
* inputs: one or more names out of ``INPUT_KINDS``, separated by commas: one case each.
* initial_state, final_state: ``fp32``, ``bf16`` or ``none``.
* tags: words for whoever picks cases, separated by commas. ``gpu``: too large for a CPU;
  ``no-peers``: ``bench`` times our implementations alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

HEAD_DIM = 128
LOWER_BOUND = -5.0
BETA_LOGIT_BYTES = 2
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "none": None}

# The data that a call must move, per token and head: q, k, v, g and out, and beta.
BYTES_PER_TOKEN_HEAD = 5 * HEAD_DIM * 2 + BETA_LOGIT_BYTES


@dataclass(frozen=True)
class Case:
    """One forward call: its shapes, and where its numbers come from."""

    name: str
    batch: int
    tokens: int  # T, the extent of the tensors
    heads: int
    inputs: str
    initial: str = "fp32"
    final: str = "fp32"
    lengths: tuple[int, ...] | None = None  # of each sequence; None: each batch entry is one
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def rows(self) -> int:
        """Tokens that belong to a sequence."""
        return self.batch * self.tokens if self.lengths is None else sum(self.lengths)

    @property
    def state_bytes(self) -> int:
        per_element = sum(
            dtype.itemsize for s in (self.initial, self.final) if (dtype := STATE_DTYPES[s])
        )
        return self.sequences * self.heads * HEAD_DIM * HEAD_DIM * per_element

    @property
    def bytes_moved(self) -> int:
        """The data that must be read or written once: the floor of any implementation."""
        return self.rows * self.heads * BYTES_PER_TOKEN_HEAD + self.state_bytes

    @property
    def tokens_text(self) -> str:
        """The lengths as people write them: 8x1024, or 1300,547,2048."""
        if self.lengths is None:
            return f"{self.batch}x{self.tokens}"
        text, i = [], 0
        while i < len(self.lengths):
            n = next((j for j, x in enumerate(self.lengths[i:]) if x != self.lengths[i]), None)
            n = len(self.lengths) - i if n is None else n
            text += [f"{n}*{self.lengths[i]}"] if n > 2 else [str(self.lengths[i])] * n
            i += n
        pad = self.tokens - self.rows
        return ",".join(text) + (f"+{pad}" if pad else "")

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())


# --- reading ------------------------------------------------------------------------------------


def folder() -> Path:
    """Where the case files lie: in an installed package, or in the source tree."""
    here = Path(__file__).resolve().parent
    candidates = (here / "data" / "cases", here.parents[1] / "tests" / "cases")
    for candidate in candidates:
        if any(candidate.glob("*.txt")):
            return candidate
    raise FileNotFoundError(f"no case files (*.txt) in {' or '.join(map(str, candidates))}")


def load(source: str | Path) -> list[Case]:
    """The cases of a file, given by path or by its name in ``folder()`` without ".txt"."""
    path = Path(source)
    if not path.suffix:
        path = folder() / f"{source}.txt"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in folder().glob("*.txt")))
        raise ValueError(f"case list: expected a path or one of {names}, got {source}")
    return list(parse(path.read_text(encoding="utf-8"), str(path)))


def select(lists: Iterable[str | Path], word: str | None = None) -> list[Case]:
    """The cases of some lists, or those of them with a word in their names; at least one."""
    chosen = [
        case for source in lists for case in load(source) if word is None or word in case.name
    ]
    if not chosen:
        raise ValueError(f"expected a word in a case's name, got {word!r}")
    return chosen


def parse(text: str, where: str = "cases") -> Iterator[Case]:
    """The cases of a file's text; ValueError names the line that is wrong."""
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        columns = line.split("#", 1)[0].split()
        if not columns:
            continue
        try:
            for case in _parse_line(columns):
                if case.name in seen:
                    raise ValueError(f"a second case named {case.name}")
                seen.add(case.name)
                yield case
        except ValueError as error:
            raise ValueError(f"{where}:{number}: {error}") from None


def _parse_line(columns: list[str]) -> Iterator[Case]:
    if len(columns) not in (6, 7):
        raise ValueError(f"expected 6 or 7 columns, got {len(columns)}")
    name, tokens, heads, inputs, initial, final = columns[:6]
    for state in (initial, final):
        if state not in STATE_DTYPES:
            raise ValueError(f"state: expected one of {', '.join(STATE_DTYPES)}, got {state}")
    batch, extent, lengths = _parse_tokens(tokens)
    tags = frozenset(columns[6].split(",")) if len(columns) == 7 else frozenset()
    kinds = inputs.split(",")
    for kind in kinds:
        if kind not in INPUT_KINDS:
            raise ValueError(f"inputs: expected one of {', '.join(INPUT_KINDS)}, got {kind}")
        full_name = name if len(kinds) == 1 else f"{name}/{kind}"
        yield Case(full_name, batch, extent, int(heads), kind, initial, final, lengths, tags)


def _parse_tokens(text: str) -> tuple[int, int, tuple[int, ...] | None]:
    if "x" in text:
        batch, tokens = text.split("x")
        return int(batch), int(tokens), None
    text, _, pad = text.partition("+")
    lengths: list[int] = []
    for item in text.split(","):
        count, star, length = item.rpartition("*")
        lengths += [int(length)] * (int(count) if star else 1)
    return 1, sum(lengths) + int(pad or 0), tuple(lengths)


# --- inputs -------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """The tensors of one call of ``flash_kda.fwd``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float
    initial_state: torch.Tensor | None
    final_state: torch.Tensor | None  # to be written
    out: torch.Tensor  # to be written
    cu_seqlens: torch.Tensor | None

    def kwargs(self) -> dict[str, Any]:
        """The arguments of fwd and explain."""
        return dict(vars(self))

    def to(self, device: torch.device | str) -> Inputs:
        moved = {n: t.to(device) if torch.is_tensor(t) else t for n, t in vars(self).items()}
        return replace(self, **moved)

    def fresh(self) -> Inputs:
        """The same inputs with outputs of their own, filled with NaN."""
        final = self.final_state
        return replace(
            self,
            out=torch.full_like(self.out, math.nan),
            final_state=None if final is None else torch.full_like(final, math.nan),
        )


class _Draw:
    """Random tensors of a case on the generator's device, rounded to bf16 as the call sees them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(case.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=self.device)
        # Rows at a time, so that large cases need no fp32 copy of a whole tensor.
        flat = out.view(-1)
        step = 1 << 26
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            drawn = torch.randn(part.numel(), generator=self.generator, device=self.device)
            part.copy_(drawn)
        return out

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        drawn = torch.rand(*shape, generator=self.generator, device=self.device)
        return low + (high - low) * drawn


def make_inputs(
    case: Case, device: torch.device | str = "cpu", generator_device: torch.device | str = "cpu"
) -> Inputs:
    """The tensors of a case on a device, outputs filled with NaN.

    They are drawn on ``generator_device``: on the CPU, the default, they are the same numbers for
    every device; on the device itself large cases are ready sooner.
    """
    draw = _Draw(case, torch.device(generator_device))
    rows = (case.batch, case.tokens, case.heads)
    state_shape = (case.sequences, case.heads, HEAD_DIM, HEAD_DIM)
    initial, final = STATE_DTYPES[case.initial], STATE_DTYPES[case.final]
    tensors: dict[str, torch.Tensor] = {
        **{name: draw.normal(*rows, HEAD_DIM) for name in ("q", "k", "v", "g")},
        "beta": draw.normal(*rows),
        "A_log": torch.zeros(case.heads, device=draw.device),
        "dt_bias": torch.zeros(case.heads, HEAD_DIM, device=draw.device),
    }
    state = None
    if initial is not None:
        state = draw.normal(*state_shape, dtype=torch.float32).mul_(0.5).to(initial)
    scale_of_v = INPUT_KINDS[case.inputs](tensors, draw)
    if state is not None and scale_of_v != 1.0:
        state = (state.float() * scale_of_v).to(state.dtype)
    cu_seqlens = None
    if case.lengths is not None:
        ends = torch.tensor(case.lengths, dtype=torch.int64).cumsum(0)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device)
    nan_state = None
    if final is not None:
        nan_state = torch.full(state_shape, math.nan, dtype=final, device=device)
    return Inputs(
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        scale=HEAD_DIM**-0.5,
        lower_bound=LOWER_BOUND,
        initial_state=None if state is None else state.to(device),
        final_state=nan_state,
        out=torch.full((*rows, HEAD_DIM), math.nan, dtype=torch.bfloat16, device=device),
        cu_seqlens=cu_seqlens,
    )


# Each changes standard normal q, k, v, g, beta and zero A_log, dt_bias in place and returns the
# factor on v, which the initial state gets too.
_Tensors = dict[str, torch.Tensor]
_Kind = Callable[[_Tensors, _Draw], float]


def _randn(x: _Tensors, draw: _Draw) -> float:
    x["A_log"].fill_(0.5)
    x["dt_bias"].fill_(0.5)
    return 1.0


def _constant_gate(g: float, beta: float | None = None) -> _Kind:
    def kind(x: _Tensors, draw: _Draw) -> float:
        x["g"].fill_(g)
        if beta is not None:
            x["beta"].fill_(beta)
        return 1.0

    return kind


def _half_fast(x: _Tensors, draw: _Draw) -> float:
    x["g"][..., 0::2] = 30.0
    x["g"][..., 1::2] = -30.0
    return 1.0


_REPEATED_PERIOD = 16


def _one_key(x: _Tensors, draw: _Draw) -> float:
    """One key for all tokens, q = k, values of a short period, hardly any decay, beta near 1."""
    x["k"].copy_(x["k"][:, :1].expand_as(x["k"]))
    x["q"].copy_(x["k"])
    tokens = torch.arange(x["v"].shape[1], device=x["v"].device)
    x["v"].copy_(x["v"][:, tokens % _REPEATED_PERIOD])
    return _constant_gate(-12.0, 8.0)(x, draw)


def _near(g: float, beta: float) -> _Kind:
    """Keys whose pairwise cosine is at least about 0.99."""

    def kind(x: _Tensors, draw: _Draw) -> float:
        k = x["k"]
        common = draw.normal(1, 1, *k.shape[2:], dtype=torch.float32)
        common /= common.norm(dim=-1, keepdim=True)
        k.copy_(common + 0.1 * HEAD_DIM**-0.5 * k.float())
        return _constant_gate(g, beta)(x, draw)

    return kind


def _scaled_v(factor: float) -> _Kind:
    def kind(x: _Tensors, draw: _Draw) -> float:
        x["v"].copy_(x["v"].float() * factor)
        return factor

    return kind


def _bench(x: _Tensors, draw: _Draw) -> float:
    """Gates that forget within a few tokens."""
    x["A_log"].copy_(draw.uniform(0.0, 1.0, *x["A_log"].shape))
    x["dt_bias"].copy_(draw.uniform(0.0, 1.0, *x["dt_bias"].shape))
    return 1.0


def _fla_init(x: _Tensors, draw: _Draw) -> float:
    """The gates of FLA's freshly initialised layer, g = 0: many channels remember long."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = draw.uniform(low, high, *x["dt_bias"].shape).exp()
    x["dt_bias"].copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
    x["g"].zero_()
    return 1.0


def _fla_test(x: _Tensors, draw: _Draw) -> float:
    """As in FLA's own tests of its flash_kda backend."""
    x["A_log"].copy_(draw.uniform(1.0, 16.0, *x["A_log"].shape).log())
    x["dt_bias"].copy_(draw.normal(*x["dt_bias"].shape, dtype=torch.float32))
    return 1.0


INPUT_KINDS: dict[str, _Kind] = {
    "randn": _randn,
    "slow": _constant_gate(-6.0),
    "slower": _constant_gate(-9.0),
    "half-fast": _half_fast,
    "fastest": _constant_gate(30.0),
    "one-key": _one_key,
    "near-6": _near(-6.0, 4.0),
    "near-9": _near(-9.0, 8.0),
    "tiny-v": _scaled_v(1e-20),
    "huge-v": _scaled_v(1e20),
    "bench": _bench,
    "fla-init": _fla_init,
    "fla-test": _fla_test,
}
