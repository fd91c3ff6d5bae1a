"""The calls of the projects that call flash_kda, each in its own style."""

from __future__ import annotations

from dataclasses import replace

import flash_kda
import pytest
import support
import torch
from flash_kda.cases import HEAD_DIM, Inputs
from support import Result, Target

SLOTS = 9  # of a serving engine's pool of states


def _indices(inputs: Inputs, device: str) -> torch.Tensor:
    sequences = len(inputs.cu_seqlens) - 1
    return torch.tensor([7, 2, 5, 0, 8][:sequences], device=device)


def _pool(inputs: Inputs, indices: torch.Tensor) -> torch.Tensor:
    """A pool whose rows at the indices are the initial states, and NaN elsewhere."""
    shape = (SLOTS, *inputs.initial_state.shape[1:])
    pool = torch.full(shape, torch.nan, dtype=inputs.initial_state.dtype, device=indices.device)
    pool[indices] = inputs.initial_state
    return pool


@pytest.mark.parametrize("line", ["2x70 3 fla-test fp32 fp32", "13,0,57 3 fla-test bf16 fp32"])
def test_flash_linear_attention(target: Target, line: str) -> None:
    """fla-core 0.6.0, its backend flash_kda: 7 arguments by position, 6 by name; out and the final
    state are torch.empty; a bf16 initial state with an fp32 one; int64 offsets; dt_bias viewed
    [H, K] from a flat one; the return value is ignored."""
    inputs = target.make(line).fresh()
    dt_bias = inputs.dt_bias.flatten().view(-1, HEAD_DIM)
    with support.forced(target.implementation), torch.inference_mode():
        flash_kda.fwd(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            inputs.scale,
            inputs.out,
            A_log=inputs.A_log,
            dt_bias=dt_bias,
            lower_bound=inputs.lower_bound,
            initial_state=inputs.initial_state.contiguous(),
            final_state=inputs.final_state,
            cu_seqlens=inputs.cu_seqlens,
        )
    target.check(inputs, Result(inputs.out, inputs.final_state), kind="fla-test")


def test_flash_linear_attention_calls_through_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's own tests replace flash_kda.fwd, so it stays a plain attribute of the module."""
    seen: list[str] = []
    monkeypatch.setattr(flash_kda, "fwd", lambda *_, **__: seen.append("called"))
    flash_kda.fwd()
    assert seen == ["called"]


def test_flash_linear_attention_with_graphs(target: Target) -> None:
    """use_graph of fla-core 0.6.0: cu_seqlens has entries for the most sequences there may be, the
    tail of length zero, and rows of T beyond the last offset."""
    inputs = target.make("40,60,4*0+28 2 fla-test fp32 fp32")
    result = target.run_and_check(inputs, "fla-test")
    assert torch.equal(result.final[2:], inputs.initial_state[2:])
    few = target.make("40,60 2 fla-test fp32 fp32")
    rows = {n: getattr(inputs, n)[:, :100] for n in ("q", "k", "v", "g", "beta")}
    few = replace(few, **rows, dt_bias=inputs.dt_bias, A_log=inputs.A_log)
    few = replace(few, initial_state=inputs.initial_state[:2])
    alone = target.run(few)
    assert support.same_bits(alone.out, result.out[:, :100])
    assert support.same_bits(alone.final, result.final[:2])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_vllm(target: Target, dtype: str) -> None:
    """vLLM (Kimi K3, GLM-5): beta is a row-strided slice of the fused projection, out a slice of a
    larger buffer, one oversized dirty workspace for all layers, int32 offsets, A_log and dt_bias
    viewed flat and [H, K]; states gathered from the pool, final_state a slice of a buffer,
    scattered back afterwards."""
    inputs = target.make(f"13,0,57,64 3 bench {dtype} {dtype}")
    tokens, heads = inputs.q.shape[1:3]
    projection = torch.randn(1, tokens, 40, device=target.device).bfloat16()
    beta = projection[..., 11 : 11 + heads].copy_(inputs.beta)
    most = flash_kda.get_workspace_size(8192, heads, 64)
    workspace = torch.full((most,), 0xFF, dtype=torch.uint8, device=target.device)
    buffer = support.sentinels_like(torch.empty(1, 512, heads, HEAD_DIM, device=target.device))
    indices = _indices(inputs, target.device)
    pool = _pool(inputs, indices)
    gathered = pool[indices].contiguous()
    finals = torch.full((16, *gathered.shape[1:]), torch.nan).to(gathered)

    with support.forced(target.implementation), torch.inference_mode():
        flash_kda.fwd(
            inputs.q.contiguous(),
            inputs.k.contiguous(),
            inputs.v.contiguous(),
            inputs.g.contiguous(),
            beta,
            inputs.scale,
            buffer[:, :tokens],
            inputs.A_log[None, None, :, None].view(-1),
            inputs.dt_bias.flatten().view(-1, HEAD_DIM),
            inputs.lower_bound,
            initial_state=gathered,
            final_state=finals[: len(indices)],
            cu_seqlens=inputs.cu_seqlens.int(),
            workspace=workspace,
        )
        pool[indices] = finals[: len(indices)]
    target.check(inputs, Result(buffer[:, :tokens], pool[indices]), kind="bench")
    rest = buffer[:, tokens:]
    assert support.same_bits(rest, support.sentinels_like(rest))
    assert torch.isnan(finals[len(indices) :]).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sglang(target: Target, dtype: str) -> None:
    """SGLang's kda_flashkda.py: 10 arguments by position, states by name, int64 offsets, logits
    recovered from beta by clamp and logit, states taken from the pool by index."""
    inputs = target.make(f"64,100 2 fla-init {dtype} {dtype}")
    beta = inputs.beta.float().sigmoid()
    beta[:, ::7] = 0.0  # whatever the layer has made of it
    beta[:, 1::7] = 1.0
    logits = torch.logit(beta, eps=1e-7).bfloat16()
    indices = _indices(inputs, target.device)
    pool = _pool(inputs, indices)
    initial = pool[indices].contiguous()
    out, final = torch.full_like(inputs.v, torch.nan), torch.full_like(initial, torch.nan)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.g, logits, inputs.scale, out)
    gate = (inputs.A_log, inputs.dt_bias, inputs.lower_bound)
    with support.forced(target.implementation), torch.inference_mode():
        flash_kda.fwd(
            *arguments,
            *gate,
            initial_state=initial,
            final_state=final,
            cu_seqlens=inputs.cu_seqlens.long(),
        )
    exact = replace(inputs, beta=logits)
    target.check(exact, Result(out, final), kind="fla-init")
    no_bias = replace(exact, dt_bias=None)  # dt_bias may be None there
    target.run_and_check(no_bias, "fla-init")


def test_upstream_by_position(target: Target) -> None:
    """All 13 arguments of MoonshotAI/FlashKDA by position; tokenspeed returns what fwd returns."""
    inputs = target.make("13,57 2 randn fp32 fp32").fresh()
    with support.forced(target.implementation):
        returned = flash_kda.fwd(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            inputs.scale,
            inputs.out,
            inputs.A_log,
            inputs.dt_bias,
            inputs.lower_bound,
            inputs.initial_state,
            inputs.final_state,
            inputs.cu_seqlens,
        )
    assert returned is inputs.out
    target.check(inputs, Result(returned, inputs.final_state))


def test_workspace_size_is_asked_before_any_tensor() -> None:
    """vLLM asks once, when the model is made, with the maxima: integers in, integers out, and a
    larger call never needs less (vllm-project/FlashKDA)."""
    most = flash_kda.get_workspace_size(16384, 96, 256)
    assert type(most) is int
    for tokens, heads, sequences in ((1, 1, 1), (16384, 96, 1), (16383, 95, 256), (0, 1, 0)):
        assert 0 <= flash_kda.get_workspace_size(tokens, heads, sequences) <= most


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_changing_lengths(target: Target, backend: str) -> None:
    """An operator that torch cannot trace breaks the graph (Dao-AILab/flash-attention#849,
    deepseek-ai/FlashMLA#180)."""

    def layer(inputs: Inputs) -> torch.Tensor:
        q, k = inputs.q * 0.5, inputs.k * 2.0
        out = torch.empty_like(inputs.v)
        with torch.no_grad():
            flash_kda.fwd(
                *(q, k, inputs.v, inputs.g, inputs.beta, inputs.scale, out, inputs.A_log),
                *(inputs.dt_bias, inputs.lower_bound, inputs.initial_state, inputs.final_state),
            )
        return out + 1.0

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with support.forced(target.implementation):
        for tokens in (20, 70, 131):
            inputs = target.make(f"2x{tokens} 2 randn fp32 fp32")
            mine, theirs = inputs.fresh(), inputs.fresh()
            assert support.same_bits(compiled(mine), layer(theirs))
            assert support.same_bits(mine.final_state, theirs.final_state)
            assert not torch.isnan(mine.final_state).any()


def test_operator_check(target: Target) -> None:
    """torch's own checks of the operator: schema, mutated arguments, fake implementation
    (Dao-AILab/flash-attention#849)."""
    operator = torch.ops.flash_kda.fwd.default
    mutated = {a.name for a in operator._schema.arguments if a.alias_info is not None}
    assert mutated == {"out", "final_state", "workspace"}
    with support.forced(target.implementation):
        for line in ("1x20 2 randn fp32 fp32", "13,7 1 randn none bf16"):
            i = target.make(line)
            i.out.zero_()
            i.final_state.zero_()
            torch.library.opcheck(
                operator,
                (
                    i.q,
                    i.k,
                    i.v,
                    i.g,
                    i.beta,
                    i.scale,
                    i.out,
                    None,
                    i.A_log,
                    i.dt_bias,
                    i.lower_bound,
                )
                + (i.initial_state, i.final_state, i.cu_seqlens),
            )
