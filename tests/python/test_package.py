"""The Python package: arguments, errors, the torch operator, and its two ways to the core."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import flash_kda
import pytest
import torch
from flash_kda import _ctypes, _errors, _operator

README = Path(__file__).parents[2] / "README.md"
HEADS = 2
SCALE = 128**-0.5


def make_call(tokens=5, batch=1, heads=HEADS, **changes):
    """Keyword arguments of fwd, with everything that is optional given."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(dtype)

    rows = (batch, tokens, heads, 128)
    call = {name: randn(*rows) for name in ("q", "k", "v", "g")}
    call["beta"] = randn(batch, tokens, heads)
    call["scale"] = SCALE
    call["out"] = torch.full(rows, float("nan"), dtype=torch.bfloat16)
    call["A_log"] = randn(heads, dtype=torch.float32)
    call["dt_bias"] = randn(heads, 128, dtype=torch.float32)
    call["lower_bound"] = -5.0
    call["initial_state"] = randn(batch, heads, 128, 128, dtype=torch.float32)
    call["final_state"] = torch.full((batch, heads, 128, 128), float("nan"))
    return call | changes


def operator_args(call):
    """The same in the operator's order."""
    order = (
        *("q", "k", "v", "g", "beta", "scale", "out", "workspace", "A_log", "dt_bias"),
        *("lower_bound", "initial_state", "final_state", "cu_seqlens"),
    )
    return tuple(call.get(name) for name in order)


# --- the surface -------------------------------------------------------------------------------


def test_signature_is_upstreams():
    names = list(inspect.signature(flash_kda.fwd).parameters)
    assert names == [
        *("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound"),
        *("initial_state", "final_state", "cu_seqlens", "workspace"),
    ]
    assert list(inspect.signature(flash_kda.explain).parameters) == names
    assert list(inspect.signature(flash_kda.get_workspace_size).parameters) == ["T_total", "H", "N"]


@pytest.mark.skipif(not README.exists(), reason="not beside the source tree")
def test_the_readmes_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert "[1, 1000, 4, 128]" in capsys.readouterr().out


def test_version_is_the_installed_one():
    from importlib.metadata import version

    assert flash_kda.__version__ == version("flash_kda")


def test_fwd_can_be_replaced(monkeypatch):
    monkeypatch.setattr(flash_kda, "fwd", lambda *args, **kwargs: "replaced")
    assert flash_kda.fwd() == "replaced"


@pytest.mark.parametrize("state", ["none", "initial", "final", "both", "same"])
@pytest.mark.parametrize("varlen", [False, True])
def test_returns_out_always(state, varlen):
    call = make_call(8)
    if state not in ("initial", "both", "same"):
        call["initial_state"] = None
    if state not in ("final", "both", "same"):
        call["final_state"] = None
    if varlen:
        call["cu_seqlens"] = torch.tensor([0, 8])
    if state == "same":
        call["final_state"] = call["initial_state"]
    assert flash_kda.fwd(**call) is call["out"]
    assert call["out"].isfinite().all()
    allocated = flash_kda.fwd(**(call | {"out": None, "final_state": None}))
    assert type(allocated) is torch.Tensor
    assert (allocated.shape, allocated.dtype) == (call["v"].shape, torch.bfloat16)


def test_positional_call_equals_keywords():
    call, same = make_call(9), make_call(9)
    flash_kda.fwd(**call)
    flash_kda.fwd(*[same[name] for name in list(inspect.signature(flash_kda.fwd).parameters)[:12]])
    assert torch.equal(call["out"], same["out"])
    assert torch.equal(call["final_state"], same["final_state"])


def test_names_that_some_callers_use():
    """The operator itself, with the workspace in the eighth place."""
    import flash_kda_C

    call, expected = make_call(9), flash_kda.fwd(**make_call(9))
    workspace = torch.empty(flash_kda_C.get_workspace_size(9, HEADS), dtype=torch.uint8)
    flash_kda_C.fwd(*operator_args(call | {"workspace": workspace}))
    assert torch.equal(call["out"], expected)
    assert flash_kda._fwd_raw is flash_kda_C.fwd


def test_none_parameters_are_zeros():
    none = flash_kda.fwd(**make_call(A_log=None, dt_bias=None))
    zeros = flash_kda.fwd(**make_call(A_log=torch.zeros(HEADS), dt_bias=torch.zeros(HEADS * 128)))
    assert torch.equal(none, zeros)


def test_inputs_are_left_alone():
    call = make_call(40)
    before = {n: t.clone() for n, t in call.items() if isinstance(t, torch.Tensor)}
    flash_kda.fwd(**call)
    for name, tensor in before.items():
        if name not in ("out", "final_state"):
            assert torch.equal(call[name], tensor), name


def test_out_none_with_strided_v_allocates_dense():
    fused = torch.randn(1, 6, HEADS * 3, 128, dtype=torch.bfloat16)
    q, k, v = fused.split(HEADS, dim=2)
    call = make_call(6, q=q, k=k, v=v, out=None)
    out = flash_kda.fwd(**call)
    dense = make_call(6, q=q.contiguous(), k=k.contiguous(), v=v.contiguous())
    assert out.is_contiguous()
    assert torch.equal(out, flash_kda.fwd(**dense))


def test_workspace_size_never_falls():
    sizes = [
        [flash_kda.get_workspace_size(t, h, n) for t in (0, 1, 63, 64, 65, 4096, 1 << 20)]
        for h in (1, 2, 96)
        for n in (1, 2, 1000)
    ]
    assert all(isinstance(size, int) and size >= 0 for row in sizes for size in row)
    assert all(row == sorted(row) for row in sizes)
    assert flash_kda.get_workspace_size(100, 4) == flash_kda.get_workspace_size(100, 4, 1)


@pytest.mark.parametrize(
    ("sizes", "exception", "says"),
    [
        ((5.0, 4), TypeError, "T_total: expected an int, got float"),
        ((5, "4"), TypeError, "H: expected an int, got str"),
        ((5, 4, -1), ValueError, "N: expected at least 0, got -1"),
    ],
)
def test_wrong_sizes_of_a_workspace_are_named(sizes, exception, says):
    with pytest.raises(exception) as caught:
        flash_kda.get_workspace_size(*sizes)
    assert str(caught.value) == says


def test_given_workspace_may_be_dirty_and_large():
    call = make_call(70)
    size = flash_kda.get_workspace_size(70, HEADS, 1) + 1000
    workspace = torch.full((size,), 255, dtype=torch.uint8)
    expected = flash_kda.fwd(**make_call(70))
    assert torch.equal(flash_kda.fwd(**call, workspace=workspace), expected)


# --- explain -----------------------------------------------------------------------------------


def test_explain_names_every_implementation_and_runs_nothing():
    call = make_call()
    verdicts = flash_kda.explain(**call)
    assert [v.name for v in verdicts] == _ctypes.implementation_names()
    assert next(v for v in verdicts if v.name == "reference").accepted
    assert call["out"].isnan().all() and call["final_state"].isnan().all()
    for verdict in verdicts:
        assert verdict.accepted == (verdict.reason == "")
        assert verdict.name in str(verdict) and verdict.reason in str(verdict)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdicts[0].name = "other"


@pytest.mark.parametrize("changes", [{"lower_bound": -7.0}, {"lower_bound": None}])
def test_explain_gives_the_arguments_fault_as_the_reason(changes):
    for verdict in flash_kda.explain(**make_call(**changes)):
        assert not verdict.accepted
        assert "lower_bound" in verdict.reason


def test_explain_without_out():
    assert any(v.accepted for v in flash_kda.explain(**make_call(out=None)))


def test_explain_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"beta: expected a torch\.Tensor, got list"):
        flash_kda.explain(**make_call(beta=[1.0]))


def test_forced_implementation(monkeypatch):
    monkeypatch.setenv("FLASH_KDA_FORCE_IMPL", "reference")
    accepted = [v.name for v in flash_kda.explain(**make_call()) if v.accepted]
    assert accepted == ["reference"]
    monkeypatch.setenv("FLASH_KDA_FORCE_IMPL", "nonesuch")
    with pytest.raises(ValueError, match="FLASH_KDA_FORCE_IMPL: expected one of .*reference"):
        flash_kda.fwd(**make_call())


# --- errors ------------------------------------------------------------------------------------

ROWS = torch.zeros(1, 5, HEADS, 128, dtype=torch.bfloat16)
STATE = torch.zeros(1, HEADS, 128, 128)

BAD_ARGUMENTS = [
    # name, value, exception, what the message says
    *((n, ROWS.float(), TypeError, "bfloat16.*float32") for n in ("q", "k", "v", "g", "out")),
    ("k", ROWS.half(), TypeError, "bfloat16.*float16"),
    *((n, ROWS[:, :4], ValueError, r"\[1, 5, 2, 128\].*\[1, 4, 2, 128\]") for n in ("k", "out")),
    ("q", ROWS[..., :64], ValueError, r"128.*\[1, 5, 2, 64\]"),
    ("v", ROWS.repeat(1, 1, 1, 4), ValueError, r"128.*\[1, 5, 2, 512\]"),
    ("g", ROWS[0], ValueError, r"\[1, 5, 2, 128\].*\[5, 2, 128\]"),
    ("q", ROWS.transpose(2, 3).contiguous().transpose(2, 3), ValueError, "strides"),
    ("q", torch.zeros(1, 1, 1, 1, 1, 5, HEADS, 128, dtype=torch.bfloat16), ValueError, "axes"),
    ("beta", torch.zeros(1, 5, HEADS, dtype=torch.float64), TypeError, "float64"),
    ("beta", torch.zeros(1, 5, dtype=torch.bfloat16), ValueError, r"\[1, 5, 2\].*\[1, 5\]"),
    ("A_log", torch.zeros(HEADS).double(), TypeError, "float64"),
    ("A_log", torch.zeros(HEADS + 1), ValueError, r"\[3\]"),
    ("dt_bias", torch.zeros(HEADS, 64), ValueError, r"\[2, 64\]"),
    ("initial_state", STATE.half(), TypeError, "float16"),
    ("final_state", STATE[:, :1], ValueError, r"\[1, 1, 128, 128\]"),
    ("final_state", STATE.transpose(2, 3), ValueError, "stride"),
    ("cu_seqlens", torch.tensor([0.0, 5.0]), TypeError, "float32"),
    ("cu_seqlens", torch.tensor([0, 6]), ValueError, "5.*6"),
    ("cu_seqlens", torch.tensor([1, 5]), ValueError, "0.*1"),
    ("cu_seqlens", torch.tensor([[0, 5]]), ValueError, r"\[1, 2\]"),
    ("workspace", torch.zeros(8), TypeError, "uint8.*float32"),
    ("scale", float("nan"), ValueError, "nan"),
    ("scale", float("inf"), ValueError, "inf"),
    ("lower_bound", 0.5, ValueError, r"-5.*0\.5"),
    ("lower_bound", -5.6, ValueError, r"-5.*-5\.6"),
    ("lower_bound", float("nan"), ValueError, "nan"),
    ("lower_bound", None, ValueError, "softplus"),
    # No tensors, no numbers.
    *((n, [1.0], TypeError, r"torch\.Tensor, got list") for n in ("q", "k", "v", "g", "beta")),
    ("q", None, TypeError, r"torch\.Tensor, got NoneType"),
    ("beta", None, TypeError, r"torch\.Tensor, got NoneType"),
    *(
        (name, "text", TypeError, r"torch\.Tensor or None, got str")
        for name in ("out", "A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens")
    ),
    ("workspace", 4096, TypeError, r"torch\.Tensor or None, got int"),
    ("scale", "text", TypeError, "float, got str"),
    ("scale", None, TypeError, "float, got NoneType"),
    ("lower_bound", "text", TypeError, "float, got str"),
]


@pytest.mark.parametrize(("name", "value", "exception", "says"), BAD_ARGUMENTS)
def test_bad_argument_is_named_and_nothing_is_written(name, value, exception, says):
    call = make_call(**{name: value})
    with pytest.raises(exception, match=f"^{name}: expected .*{says}") as caught:
        flash_kda.fwd(**call)
    assert type(caught.value) is exception
    for buffer in ("out", "final_state"):
        if buffer != name:
            assert call[buffer].isnan().all()
    flash_kda.fwd(**make_call())  # the next call is fine


def test_batch_with_cu_seqlens_is_refused():
    call = make_call(64, batch=2, cu_seqlens=torch.tensor([0, 64, 128]))
    with pytest.raises(ValueError, match="^cu_seqlens: expected B = 1 .*got B = 2"):
        flash_kda.fwd(**call)


def test_another_projects_call_gets_the_expected_shapes():
    """Head-first layout, a gate of three axes and no output."""
    q = k = v = torch.zeros(1, HEADS, 5, 128, dtype=torch.bfloat16)
    g = torch.zeros(1, 5, HEADS * 128, dtype=torch.bfloat16)
    beta = torch.zeros(1, 5, HEADS, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected shape \[B, T, H, 128\]"):
        flash_kda.fwd(q, k, v, g, beta, SCALE, lower_bound=-5.0)


def test_grouped_value_heads_are_refused():
    v = torch.zeros(1, 5, 2 * HEADS, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^v: expected .*\[1, 5, 2, 128\].*\[1, 5, 4, 128\]"):
        flash_kda.fwd(**make_call(v=v, out=None))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_gradients_are_refused_by_name(name):
    call = make_call()
    call[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"inference only.* of {name}"):
        flash_kda.fwd(**call)
    assert call["out"].isnan().all()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert flash_kda.fwd(**call).isfinite().all()


def test_status_codes_map_to_exceptions():
    for code, exception in _errors.EXCEPTIONS.items():
        coded = RuntimeError(f"[flash_kda:{code}] q: two\nlines")
        translated = _errors.translate(coded, {})
        assert type(translated) is exception
        assert str(translated) == "q: two\nlines"
    other = RuntimeError("of someone else")
    assert _errors.translate(other, make_call(cu_seqlens=None, workspace=None)) is other


# --- the torch operator ------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["none", "both", "same"])
@pytest.mark.parametrize("varlen", [False, True])
def test_opcheck(state, varlen):
    call = make_call(6)
    if state == "none":
        call["initial_state"] = call["final_state"] = None
    if state == "same":
        call["final_state"] = call["initial_state"]
    if varlen:
        call["cu_seqlens"] = torch.tensor([0, 6])
    torch.library.opcheck(torch.ops.flash_kda.fwd.default, operator_args(call))


def test_opcheck_with_workspace():
    workspace = torch.empty(flash_kda.get_workspace_size(6, HEADS, 1) + 1, dtype=torch.uint8)
    call = make_call(6, workspace=workspace)
    torch.library.opcheck(torch.ops.flash_kda.fwd.default, operator_args(call))


def test_schema_declares_what_is_written():
    schema = torch.ops.flash_kda.fwd.default._schema
    assert str(schema) == "flash_kda::" + _operator.SCHEMA
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["out", "workspace", "final_state"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_in_one_graph_with_dynamic_tokens(backend):
    def layer(q, k, v, g, beta, state):
        out = flash_kda.fwd(
            q, k, v, g, beta, SCALE, lower_bound=-5.0, initial_state=state, final_state=state
        )
        return out.float() * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for tokens in (5, 64, 17):
            call = make_call(tokens)
            inputs = [call[n] for n in ("q", "k", "v", "g", "beta")]
            state, expected_state = call["initial_state"], call["initial_state"].clone()
            expected = layer(*inputs, expected_state)
            assert torch.equal(compiled(*inputs, state), expected)
            assert torch.equal(state, expected_state)


def test_compiled_call_writes_the_given_output():
    call = make_call(12)
    expected = flash_kda.fwd(**make_call(12))
    args = operator_args(call)[1:6]

    def layer(q, out):
        return flash_kda.fwd(
            *(q, *args, out, call["A_log"], call["dt_bias"], -5.0),
            initial_state=call["initial_state"],
        )

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        returned = compiled(call["q"], call["out"])
    assert returned is call["out"]
    assert torch.equal(call["out"], expected)


def test_fake_operator_refuses_wrong_shapes():
    call = make_call(6)
    meta = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    operator = torch.ops.flash_kda.fwd.default
    assert operator(*operator_args(meta)) is None
    for name in ("k", "beta", "final_state"):
        with pytest.raises(ValueError, match=f"^{name}: expected shape"):
            operator(*operator_args(meta | {name: meta[name][:, :1]}))
    with pytest.raises(TypeError, match="^g: expected dtype bfloat16"):
        operator(*operator_args(meta | {"g": meta["g"].float()}))


# --- the two ways to the core --------------------------------------------------------------------

RUN_AND_SAVE = """
import sys, torch, flash_kda
from flash_kda import _operator
assert _operator.USES_BINDING == (sys.argv[1] == "torch"), _operator.USES_BINDING
call = torch.load(sys.argv[2])
flash_kda.fwd(**call)
errors = []
for bad in ({"q": call["q"].float()}, {"k": call["k"][:, :3]}, {"lower_bound": -9.0}, {"v": [1]}):
    try:
        flash_kda.fwd(**(call | bad))
    except Exception as error:
        errors.append((type(error).__name__, str(error)))
schema = str(torch.ops.flash_kda.fwd.default._schema)
torch.library.opcheck(torch.ops.flash_kda.fwd.default, tuple(call[n] for n in (
    "q", "k", "v", "g", "beta", "scale", "out", "workspace", "A_log", "dt_bias", "lower_bound",
    "initial_state", "final_state", "cu_seqlens")))
torch.save((call["out"], call["final_state"], errors, schema), sys.argv[3])
"""


def test_ctypes_route_is_bitwise_the_binding(tmp_path):
    if not _operator.USES_BINDING:
        pytest.skip("the operator runs by ctypes here")
    call = make_call(100, cu_seqlens=torch.tensor([0, 37, 37, 100]), workspace=None)
    call["initial_state"] = torch.randn(3, HEADS, 128, 128)
    call["final_state"] = torch.zeros(3, HEADS, 128, 128, dtype=torch.bfloat16)
    torch.save(call, tmp_path / "call.pt")
    results = []
    for route in ("torch", "ctypes"):
        path = tmp_path / f"{route}.pt"
        subprocess.run(
            [sys.executable, "-c", RUN_AND_SAVE, route, tmp_path / "call.pt", path],
            env=os.environ | {"FLASH_KDA_BINDING": route},
            cwd=tmp_path,
            check=True,
        )
        results.append(torch.load(path))
    (out, state, errors, schema), (out_c, state_c, errors_c, schema_c) = results
    assert torch.equal(out, out_c)
    assert torch.equal(state, state_c)
    assert len(errors) == 4 and errors == errors_c
    assert schema == schema_c


def test_unknown_route_is_named(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", "import flash_kda"],
        env=os.environ | {"FLASH_KDA_BINDING": "pybind"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "FLASH_KDA_BINDING: expected auto, torch or ctypes, got pybind" in result.stderr


def test_importing_needs_no_compiler(tmp_path):
    """An installed package builds nothing at run time."""
    program = (
        "import torch, flash_kda\n"
        "x = torch.zeros(1, 3, 1, 128, dtype=torch.bfloat16)\n"
        "flash_kda.fwd(x, x, x, x, x[..., 0], 1.0, lower_bound=-5.0)"
    )
    env = os.environ | {"PATH": str(tmp_path), "HOME": str(tmp_path / "absent")}
    subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, check=True)
