"""Faults of numerics that users of delta-rule and attention kernels met in the field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import support
import torch
from flash_kda.cases import HEAD_DIM, Inputs
from flash_kda.cli import errors
from support import Target


@pytest.mark.parametrize("kind", ["one-key", "near-6", "near-9"])
def test_collinear_keys(fast_target: Target, kind: str) -> None:
    """The chunk's triangular system is nearly singular when tokens repeat: keys collinear, beta
    near 1, hardly any decay. Powers of it in half precision cancel to NaN or to nonsense
    (vllm-project/FlashKDA#10, MoonshotAI/FlashKDA#34)."""
    inputs = fast_target.make(f"1x16384 1 {kind} none fp32")
    result = fast_target.run_and_check(inputs, kind)
    if kind != "one-key":
        return
    # beta is 1 and q = k: the token's own value is read back.
    support.check_close("out", result.out, inputs.scale * inputs.v.float(), 0.01)


@pytest.mark.parametrize("pattern", ["opposite", "two-keys", "blocks"])
def test_patterns_of_collinear_keys(fast_target: Target, pattern: str) -> None:
    """The same class: keys of opposite sign, two keys in turn, runs of equal keys that end inside
    a block (vllm-project/FlashKDA#10)."""
    inputs = fast_target.make("1x1000 2 one-key fp32 fp32")
    tokens = torch.arange(1000, device=inputs.k.device)
    if pattern == "opposite":
        inputs.k[:, tokens % 2 == 1] *= -1
    else:
        other = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(1))
        odd = tokens % 2 == 1 if pattern == "two-keys" else tokens // 23 % 2 == 1
        inputs.k[:, odd] = other.to(inputs.k)
    fast_target.run_and_check(inputs, "one-key")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zero_vectors(fast_target: Target, name: str) -> None:
    """A norm of zero must not divide: padding tokens and dead heads have q, k or v all zero
    (same class as vllm-project/FlashKDA#10: NaN from harmless tokens)."""
    inputs = fast_target.make("1x200 2 randn fp32 fp32")
    getattr(inputs, name)[:, ::3] = 0
    result = fast_target.run_and_check(inputs)
    if name == "q":
        assert (result.out[:, ::3] == 0).all()
    getattr(inputs, name).zero_()
    fast_target.run_and_check(inputs)


@pytest.mark.parametrize("first", [0.0, 1e-20])
def test_large_values_after_small_ones(fast_target: Target, first: float) -> None:
    """Scales that keep half precision in range must follow a row from nothing to large numbers
    (the class of infinities in MoonshotAI/FlashKDA#7: a factor that leaves its type's range)."""
    inputs = fast_target.make("1x256 1 randn none fp32")
    inputs.v[:, :128] *= first
    inputs.v[:, 128:] *= 1e20
    fast_target.run_and_check(inputs)


@pytest.mark.parametrize("kind", ["fastest", "half-fast"])
@pytest.mark.parametrize("lower_bound", [-5.0, -2.5, -0.01, 0.0])
def test_fast_decay(fast_target: Target, kind: str, lower_bound: float) -> None:
    """exp of minus the cumulated decay leaves fp32's range once a block decays by 88 nats, as the
    fastest gates do within 18 tokens (MoonshotAI/FlashKDA#7, flashinfer-ai/flashinfer#5032)."""
    inputs = fast_target.make(f"1x500 2 {kind} fp32 fp32")
    fast_target.run_and_check(replace(inputs, lower_bound=lower_bound), kind)


@pytest.mark.parametrize("a_log", [-20.0, -3.0, 5.0, 20.0])
def test_extreme_gate_parameters(fast_target: Target, a_log: float) -> None:
    """The same class: gates that saturate through A_log, or that are infinite themselves."""
    inputs = fast_target.make("1x300 2 randn fp32 fp32")
    inputs.A_log.fill_(a_log)
    inputs.g[:, 10:20, 0] = math.inf
    inputs.g[:, 30:200, 1] = -math.inf
    inputs.g[:, 210:220] = 3e38
    inputs.g[:, 230:240] = -3e38
    fast_target.run_and_check(inputs, "half-fast")


@pytest.mark.parametrize("lower_bound", [-5.6, -7.0, -math.inf, 0.1, math.inf, math.nan])
def test_lower_bound_out_of_range(target: Target, lower_bound: float) -> None:
    """Decay faster than kernels are built for gave inf or NaN instead of an error
    (MoonshotAI/FlashKDA#7, flashinfer-ai/flashinfer#5032)."""
    inputs = target.make("1x64 2 fastest fp32 fp32")
    changes = {"lower_bound": lower_bound}
    support.expect_error(target, inputs, changes, ValueError, "lower_bound:", "[-5, 0]")


def test_softplus_gate_is_named(target: Target) -> None:
    """A model trained with the softplus gate has no lower bound; run with one it repeats itself
    (MoonshotAI/FlashKDA#3). Leaving the bound out must not mean some bound."""
    inputs = target.make("1x64 2 randn fp32 fp32")
    changes = {"lower_bound": None}
    support.expect_error(target, inputs, changes, ValueError, "lower_bound:", "None", "softplus")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beta_logits_at_the_ends(fast_target: Target, dtype: torch.dtype) -> None:
    """Callers that invert a sigmoid to get logits send infinities for beta of 0 or 1
    (sgl-project/sglang#29472)."""
    inputs = fast_target.make("1x400 2 randn fp32 fp32")
    ends = torch.tensor([math.inf, -math.inf, 60.0, -60.0, 3e38, -3e38, 100.0, -100.0])
    beta = ends.to(inputs.beta).to(dtype).repeat(100).reshape(1, 400, 2)
    fast_target.run_and_check(replace(inputs, beta=beta))
    # Nothing is ever written by beta = 0: the state only decays, and without decay it stays.
    still = replace(inputs, beta=torch.full_like(beta, -math.inf), lower_bound=0.0)
    assert torch.equal(fast_target.run(still).final, inputs.initial_state)


# Where every chunk of a sequence is cut at the same tokens, however long the sequence is.
# The tail of a cut is a shorter chunk; on a GPU its rounding may differ.
PREFIX_STABLE = ("cpu", "cuda.portable")
WHOLE_CHUNKS = 64


@pytest.mark.parametrize("cuts", [(8192, 16384, 24576), (8191,), (16383,), (8191, 16383)])
def test_chunked_prefill(fast_target: Target, cuts: tuple[int, ...]) -> None:
    """A prompt in pieces with the state carried drifts from the prompt in one
    (vllm-project/vllm#52909)."""
    tokens = 32768
    inputs, expected = _long_prompt(fast_target.device, tokens)
    once = fast_target.run(inputs)
    fast_target.check(inputs, once, expected, "fla-init")

    state, outs = inputs.initial_state, []
    for begin, end in zip((0, *cuts), (*cuts, tokens), strict=True):
        piece = support.tokens_slice(inputs, begin, end, initial_state=state)
        result = fast_target.run(piece)
        outs.append(result.out)
        state = result.final
    whole = support.Result(torch.cat(outs, 1), state)
    fast_target.check(inputs, whole, expected, "fla-init")
    if fast_target.implementation in PREFIX_STABLE:
        same = cuts[0] if fast_target.device == "cpu" else cuts[0] // WHOLE_CHUNKS * WHOLE_CHUNKS
        assert support.same_bits(outs[0][:, :same], once.out[:, :same])


def _long_prompt(device: str, tokens: int) -> tuple[Inputs, support.Result]:
    """Gates of a fresh layer, which remember long enough to carry an error on."""
    one = support.case(f"1x{tokens} 1 fla-init fp32 fp32")
    return support.case_inputs(one, device), support.case_oracle(one)


@pytest.mark.parametrize("tokens", [32767, 32768, 32769, 131072])
def test_long_sequences(fast_target: Target, tokens: int) -> None:
    """NaN beyond 32768 tokens, from a counter or an accumulated decay that runs out of range
    (QwenLM/FlashQLA#38). Errors must not grow along the sequence either."""
    one = support.case("1x131072 1 slower none fp32")
    inputs, expected = support.case_inputs(one, fast_target.device), support.case_oracle(one)
    prefix = support.tokens_slice(inputs, 0, tokens)
    result = fast_target.run(prefix)
    assert torch.isfinite(result.out).all()
    assert torch.isfinite(result.final).all()
    limit = fast_target.limits("slower")[0]
    first = support.relative_error(result.out[:, :1000], expected.out[:, :1000])
    last = slice(tokens - 1000, tokens)
    assert first <= limit
    assert support.relative_error(result.out[:, last], expected.out[:, last]) <= 2 * first
    if tokens == one.tokens:
        fast_target.check(prefix, result, expected, "slower")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_state_is_value_by_key(target: Target, dtype: str) -> None:
    """A state read or written transposed has the same shape and loses the context silently
    (vllm-project/vllm#41292)."""
    inputs = target.make(f"1x1 2 randn {dtype} {dtype}")
    channel = 5
    inputs.beta.fill_(-math.inf)
    inputs.q.zero_()
    inputs.q[..., channel] = 1
    result = target.run(inputs)
    initial = inputs.initial_state.double()
    x = inputs.A_log.double().exp()[:, None] * (inputs.g[0, 0].double() + inputs.dt_bias.double())
    decay = (inputs.lower_bound * torch.sigmoid(x)).exp()  # [H, K]
    norm = math.sqrt(1 + 1e-6)
    read = inputs.scale * decay[:, None, channel] * initial[0, :, :, channel] / norm
    support.check_close("out", result.out[0, 0], read, target.limits()[0])
    limit = errors.BF16_STATE_LIMIT if dtype == "bf16" else target.limits()[1]
    support.check_close("final_state", result.final[0], initial[0] * decay[:, None, :], limit)
