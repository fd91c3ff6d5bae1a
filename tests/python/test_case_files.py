"""The case lists' syntax, and that inputs are what they say they are."""

from __future__ import annotations

import pytest
import torch
from flash_kda import cases
from support import case, same_bits


def test_columns() -> None:
    text = """
    # a comment
    fixed    2x30   4  randn       fp32  none
    packed   3*5,7,2*0+4  1  slow,bench  none  bf16  gpu,long   # two of them
    """
    fixed, slow, bench = cases.parse(text)
    assert (fixed.batch, fixed.tokens, fixed.heads, fixed.inputs) == (2, 30, 4, "randn")
    assert (fixed.initial, fixed.final, fixed.lengths, fixed.tags) == ("fp32", "none", None, set())
    assert (slow.name, bench.name) == ("packed/slow", "packed/bench")
    assert slow.lengths == (5, 5, 5, 7, 0, 0)
    assert (slow.batch, slow.tokens, slow.rows, slow.sequences) == (1, 26, 22, 6)
    assert slow.tags == {"gpu", "long"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("name 1x2 1 randn fp32", "expected 6 or 7 columns, got 5"),
        ("name 1x2 1 random fp32 fp32", "inputs: expected one of randn, .*, got random"),
        ("name 1x2 1 randn fp16 fp32", "state: expected one of fp32, bf16, none, got fp16"),
        ("name 1xa 1 randn fp32 fp32", "invalid literal"),
        ("a 1x2 1 randn fp32 fp32\na 1x3 1 randn fp32 fp32", "list:2: a second case named a"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        list(cases.parse(line, "list"))
    assert str(caught.value).startswith("list:")


@pytest.mark.parametrize("text", ["4x17", "1300,547,2048", "9*1", "400*0,1,599*0", "40,60+28"])
def test_tokens_read_as_written(text: str) -> None:
    one = case(f"{text} 1 randn none none")
    assert one.tokens_text == text
    assert case(f"{one.tokens_text} 1 randn none none") == one


def test_bytes_that_must_move() -> None:
    tokens = 10 * 3 * (5 * 256 + 2)  # q, k, v, g, out and beta
    states = 2 * 3 * 128 * 128 * (4 + 2)  # of 2 sequences and 3 heads
    assert case("4,6+5 3 randn fp32 bf16").bytes_moved == tokens + states
    assert case("1x10 3 randn none none").bytes_moved == tokens


@pytest.mark.parametrize("name", ["accuracy", "shapes", "bench", "bench_cpu", "choice", "fla"])
def test_the_lists_read(name: str) -> None:
    assert cases.load(name)


def test_the_table_of_times_is_listed_with_both_gate_sets() -> None:
    listed = {(one.tokens_text, one.heads, one.inputs) for one in cases.load("bench")}
    shapes = [
        *(("1x8192", heads) for heads in (96, 64, 32, 12)),
        ("1300,547,2048,963,271,3063", 96),
        *(("8*1024", heads) for heads in (96, 64)),
        *(("1x2048", 12), ("1x65536", 8), ("1x65536", 1), ("256*128", 96), ("256*1", 32)),
    ]
    assert listed == {(*shape, gates) for shape in shapes for gates in ("bench", "fla-init")}


# --- inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", cases.INPUT_KINDS)
def test_inputs_are_drawn_alike_and_are_legal(kind: str) -> None:
    one = case(f"20,13+3 2 {kind} fp32 bf16")
    first, second = cases.make_inputs(one), cases.make_inputs(one)
    for name, tensor in first.kwargs().items():
        if torch.is_tensor(tensor):
            assert same_bits(tensor, getattr(second, name)), name
            if name not in ("out", "final_state"):
                assert tensor.isfinite().all(), name
    assert first.out.isnan().all() and first.final_state.isnan().all()
    assert first.cu_seqlens.tolist() == [0, 20, 33]
    assert first.initial_state.shape == (2, 2, 128, 128)


@pytest.mark.parametrize(("kind", "gate", "logit"), [("near-6", -6, 4), ("near-9", -9, 8)])
def test_near_keys(kind: str, gate: float, logit: float) -> None:
    inputs = cases.make_inputs(case(f"1x300 2 {kind} none none"))
    keys = torch.nn.functional.normalize(inputs.k[0].float(), dim=-1).transpose(0, 1)
    assert (keys @ keys.mT).min() > 0.98
    assert (keys @ keys.mT).mean() > 0.99
    assert (inputs.g == gate).all() and (inputs.beta == logit).all()


def test_one_key() -> None:
    inputs = cases.make_inputs(case("1x100 2 one-key none none"))
    assert torch.equal(inputs.k, inputs.k[:, :1].expand_as(inputs.k))
    assert torch.equal(inputs.q, inputs.k)
    assert torch.equal(inputs.v[:, 16:], inputs.v[:, :-16])
    assert (inputs.g == -12).all() and (inputs.beta == 8).all()


def test_gate_sets() -> None:
    """As fla's layer starts, a token's log decay is -0.005 to -0.5; bench's forgets at once."""

    def decay(kind: str) -> torch.Tensor:
        x = cases.make_inputs(case(f"1x64 8 {kind} none none"))
        return x.lower_bound * torch.sigmoid(x.A_log.exp()[:, None] * (x.g.float() + x.dt_bias))

    slow = decay("fla-init")
    assert -0.51 < slow.min() < -0.4 and -0.006 < slow.max() < -0.0049
    assert decay("bench").mean() < -2


def test_scaled_values() -> None:
    for kind, factor in {"tiny-v": 1e-20, "huge-v": 1e20}.items():
        inputs = cases.make_inputs(case(f"1x64 2 {kind} fp32 none"))
        assert 0.9 < inputs.v.float().std() / factor < 1.1
        assert 0.4 < inputs.initial_state.std() / factor < 0.6
