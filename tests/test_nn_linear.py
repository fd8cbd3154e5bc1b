"""StructuredLinear stands in for nn.Linear: init, dtypes, devices, autocast, compile, copies and saved states."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from cases import CASES, PROJECTABLE, UNPADDED, Case, relative_error, rms
from torch import Tensor, nn

from lamella import ops
from lamella.nn import StructuredLinear
from lamella.structures import BTT, BlockDense, BlockShuffle, Dense, LowRank, parse_structure

SPECTRAL = pytest.mark.parametrize("case", PROJECTABLE, ids=lambda c: c.id)
INIT_OF = [
    (case, init) for case in CASES for init in ("mup", "spectral") if init == "mup" or case in PROJECTABLE
]
EVERY_INIT = pytest.mark.parametrize(("case", "init"), INIT_OF, ids=lambda v: getattr(v, "id", v))


def layer_of(case: Case, **options: Any) -> StructuredLinear:
    return StructuredLinear(case.in_features, case.out_features, case.structure, **options)


def randomise(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return layer


def test_a_layer_is_the_independent_matrix_and_its_bias(case: Case) -> None:
    layer = layer_of(case, dtype=torch.float64)
    randomise(layer)
    x = torch.randn(4, case.in_features, dtype=torch.float64)
    weight = case.dense(list(layer.factors))
    torch.testing.assert_close(layer(x), x @ weight.T + layer.bias)
    torch.testing.assert_close(layer.dense(), weight)


def test_a_layer_looks_like_nn_linear(case: Case) -> None:
    for bias in (True, False):
        ours, theirs = layer_of(case, bias=bias), nn.Linear(case.in_features, case.out_features, bias)
        assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)
        assert (ours.bias is None) == (theirs.bias is None)
        assert ours.weight.shape == theirs.weight.shape
        assert (ours.weight.dtype, ours.weight.device) == (theirs.weight.dtype, theirs.weight.device)
        assert f"in_features={case.in_features}, out_features={case.out_features}, bias={bias}" in repr(ours)
        assert repr(case.structure) in repr(ours)
        names = [f"factors.{k}" for k in range(case.plan.num_factors)] + ["bias"] * bias
        assert sorted(ours.state_dict()) == sorted(names)
        for shape in ((), (2,), (2, 3), (0,)):
            assert ours(torch.randn(*shape, case.in_features)).shape == (*shape, case.out_features)


def test_an_input_of_another_width_is_refused_even_where_padding_could_hide_it(case: Case) -> None:
    layer = layer_of(case)
    for width in {case.in_features + 1, case.in_features - 1, case.plan.padded_in} - {case.in_features}:
        with pytest.raises(ValueError, match=f"expected an input of shape .*, {case.in_features}"):
            layer(torch.randn(2, width))


def test_an_input_of_another_dtype_is_refused_as_by_nn_linear() -> None:
    layer = StructuredLinear(8, 8, BTT(gamma=2, phi=2))
    for module in (layer, nn.Linear(8, 8)):
        with pytest.raises(RuntimeError, match=r"type"):
            module(torch.randn(2, 8, dtype=torch.float64))


def test_the_weight_answers_shape_and_dtype_but_its_values_are_nan() -> None:
    layer = StructuredLinear(8, 12, LowRank(rank=2), dtype=torch.bfloat16)
    assert layer.weight.shape == (12, 8)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.isnan(layer.weight).all()
    assert torch.isnan(nn.functional.linear(torch.zeros(8, dtype=torch.bfloat16), layer.weight)).all()
    with pytest.raises(RuntimeError):
        nn.init.normal_(layer.weight)
    with pytest.raises((KeyError, AttributeError)):
        layer.weight = nn.Parameter(torch.zeros(12, 8))  # type: ignore[misc]


# --- init


def test_output_variance_at_mup_init_is_what_the_fans_predict(case: Case) -> None:
    """Mean square output for unit-variance inputs = mean over outputs of the squared row norms of W."""
    plan, layer = case.plan, layer_of(case, bias=False, dtype=torch.float64)
    samples = []
    for _ in range(200):
        layer.reset_parameters()
        samples.append(layer.dense().detach()[: plan.padded_out].square().sum(1).mean())
    seen = torch.stack(samples)
    predicted = min(1.0, case.in_features / plan.padded_in)
    for fan_in, fan_out in plan.fans:
        predicted *= min(fan_in, fan_out) / fan_in
    assert plan.mup_gain == pytest.approx(predicted)
    standard_error = seen.std().item() / math.sqrt(len(seen))
    assert standard_error < 0.15 * predicted, "the band must mean something"
    assert abs(seen.mean().item() - predicted) < 4.5 * standard_error


def test_each_factor_has_the_standard_deviation_of_its_fans() -> None:
    for structure in (LowRank(rank=64), BTT(), BlockShuffle(num_blocks=4), BlockDense(num_blocks=4, rank=64)):
        layer = StructuredLinear(256, 1024, structure)
        for factor, (fan_in, fan_out) in zip(layer.factors, layer.plan.fans, strict=True):
            expected = math.sqrt(min(fan_in, fan_out)) / fan_in
            # the relative error of a sample standard deviation is 1 / sqrt(2n)
            assert abs(rms(factor.detach()) / expected - 1) < 4.5 / math.sqrt(2 * factor.numel())


@pytest.mark.parametrize("case", UNPADDED, ids=lambda c: c.id)
@pytest.mark.parametrize("init_std", [None, 0.02])
def test_spectral_init_keeps_the_largest_part_of_a_gaussian_matrix(
    case: Case, init_std: float | None
) -> None:
    """The energy of W is that of the top rho singular values of each block of a Gaussian matrix."""
    sizes = case.plan.sizes
    std = init_std or math.sqrt(min(case.in_features, case.out_features)) / case.in_features
    layer = layer_of(case, bias=False, init="spectral", init_std=init_std, dtype=torch.float64)
    seen, expected = [], []
    for _ in range(60):
        layer.reset_parameters()
        seen.append(layer.dense().detach().square().sum())
        if case.plan.num_factors == 1:
            expected.append((torch.randn(case.out_features, case.in_features).double() * std).square().sum())
            continue
        blocks = torch.randn(
            sizes["gamma"] * sizes["phi"],
            sizes["alpha"] * sizes["delta"],
            sizes["beta"] * sizes["epsilon"],
            dtype=torch.float64,
        )
        expected.append((torch.linalg.svdvals(blocks * std)[:, : sizes["rho"]]).square().sum())
    ours, theirs = torch.stack(seen), torch.stack(expected)
    standard_error = math.sqrt((ours.var() + theirs.var()).item() / len(ours))
    assert abs((ours.mean() - theirs.mean()).item()) < 4.5 * standard_error
    assert standard_error < 0.2 * theirs.mean().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@EVERY_INIT
def test_every_init_works_in_every_dtype_with_a_zero_bias(case: Case, init: str, dtype: torch.dtype) -> None:
    layer = layer_of(case, init=init, dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert all(f.any() and torch.isfinite(f).all() for f in layer.factors)
    assert layer.bias is not None
    assert not layer.bias.any()


def test_a_16_bit_init_is_the_float32_one_rounded_once() -> None:
    for init in ("mup", "spectral"):
        torch.manual_seed(3)
        exact = StructuredLinear(16, 16, BTT(), init=init)
        torch.manual_seed(3)
        rounded = StructuredLinear(16, 16, BTT(), init=init, dtype=torch.bfloat16)
        for f, g in zip(exact.factors, rounded.factors, strict=True):
            assert torch.equal(f.bfloat16(), g)


def test_init_is_seeded_and_two_layers_differ(case: Case) -> None:
    torch.manual_seed(1)
    first, second = layer_of(case), layer_of(case)
    torch.manual_seed(1)
    again = layer_of(case)
    assert torch.equal(first.factors[0], again.factors[0])
    assert not torch.equal(first.factors[0], second.factors[0])


@EVERY_INIT
def test_zero_last_starts_at_zero_through_the_last_factor_alone(case: Case, init: str) -> None:
    layer = layer_of(case, init=init, zero_last=True)
    last = case.plan.order[-1]
    assert [bool(f.any()) for f in layer.factors] == [k != last for k in range(case.plan.num_factors)]
    assert not layer(torch.randn(3, case.in_features)).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "mpu"}, "unknown init 'mpu'.*did you mean 'mup'"),
        ({"init_std": 0.02}, "init_std is a positive number for init 'spectral' only"),
        ({"init": "spectral", "init_std": 0}, "init_std is a positive number"),
        ({"init": "spectral", "init_std": -1.0}, "init_std is a positive number"),
        ({"init": "spectral", "init_std": math.nan}, "init_std is a positive number"),
        ({"init": "spectral", "init_std": math.inf}, "init_std is a positive number"),
    ],
)
def test_an_init_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredLinear(8, 8, LowRank(rank=2), **options)


def test_a_structure_must_be_one_and_must_fit() -> None:
    for wrong in ("LowRank(rank=2)", None, LowRank, 2):
        with pytest.raises(ValueError, match="structure must be one like"):
            StructuredLinear(8, 8, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not fit 8 -> 8"):
        StructuredLinear(8, 8, LowRank(rank=9))
    for sizes in ((0, 8), (8, -1), (8, 1.5), (True, 8)):
        with pytest.raises(ValueError, match="must be a positive integer"):
            StructuredLinear(*sizes, LowRank(rank=1))  # type: ignore[arg-type]


def test_spectral_init_of_three_factors_is_refused() -> None:
    case = next(c for c in CASES if c.plan.num_factors == 3)
    with pytest.raises(ValueError, match="at most two factors"):
        layer_of(case, init="spectral")


# --- training


@pytest.mark.parametrize("zero_last", [False, True])
@EVERY_INIT
def test_every_factor_gets_a_gradient_within_three_adamw_steps(
    case: Case, init: str, zero_last: bool
) -> None:
    layer = layer_of(case, init=init, zero_last=zero_last)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    reached = dict.fromkeys(dict(layer.named_parameters()), False)
    for _ in range(3):
        x = torch.randn(16, case.in_features)
        (layer(x) - torch.randn(16, case.out_features)).square().mean().backward()
        for name, parameter in layer.named_parameters():
            reached[name] |= parameter.grad is not None and bool(parameter.grad.any())
        optimizer.step()
        optimizer.zero_grad()
    assert all(reached.values()), reached


# --- precision


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_keep_the_layers_dtype(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype=dtype)
    x = torch.randn(4, case.in_features, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == dtype
    assert x.grad is not None
    assert {t.grad.dtype for t in (*layer.parameters(), x)} == {dtype}  # type: ignore[union-attr]


def errors(layer: nn.Module, weight: Tensor, x: Tensor, direction: Tensor) -> tuple[float, float, set[Any]]:
    """Forward and input-gradient errors against float64, and the dtypes of output and gradients."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(direction.to(y.dtype))
    exact = x.detach().double() @ weight.T
    if getattr(layer, "bias", None) is not None:
        exact = exact + layer.bias.detach().double()  # type: ignore[operator,union-attr]
    exact_gradient = direction.to(y.dtype).double() @ weight
    assert x.grad is not None
    kinds = (y.dtype, x.grad.dtype, frozenset(p.grad.dtype for p in layer.parameters()))  # type: ignore[union-attr]
    return relative_error(y.detach(), exact), relative_error(x.grad, exact_gradient), {kinds}


def test_autocast_errs_at_most_twice_as_much_as_nn_linear_with_its_dtypes(case: Case) -> None:
    ours, plain = layer_of(case), nn.Linear(case.in_features, case.out_features)
    nn.init.normal_(ours.bias)  # type: ignore[arg-type]
    nn.init.normal_(plain.bias)
    x, direction = torch.randn(512, case.in_features), torch.randn(512, case.out_features)
    weight = case.dense([f.detach().double() for f in ours.factors])
    mine = errors(ours, weight, x, direction)
    theirs = errors(plain, plain.weight.detach().double(), x, direction)
    assert mine[2] == theirs[2]
    assert mine[0] <= 2 * theirs[0]
    assert mine[1] <= 2 * theirs[1]


def test_autocast_leaves_float64_layers_alone_as_nn_linear_does() -> None:
    x = torch.randn(2, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            StructuredLinear(8, 8, BTT(gamma=2, phi=2), dtype=torch.float64)(x).dtype
            == nn.Linear(8, 8, dtype=torch.float64)(x).dtype
        )


def test_the_dense_matrix_of_16_bit_factors_is_rounded_once(case: Case) -> None:
    layer = layer_of(case, dtype=torch.bfloat16)
    exact = case.dense([f.detach().double() for f in layer.factors])
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours = layer.dense()
        assert ours.dtype == torch.bfloat16
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=2**-8 * 1e-3)


# --- compile


def compiled_matches(layer: nn.Module, case: Case, backend: str) -> None:
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(4, case.in_features, dtype=torch.float64)
    got, expected = fast(x), layer(x)
    torch.testing.assert_close(got, expected)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad((got * direction).sum(), list(layer.parameters()))
    plain = torch.autograd.grad((expected * direction).sum(), list(layer.parameters()))
    torch.testing.assert_close(gradients, plain)


def test_compile_takes_the_whole_graph_forward_and_backward(case: Case) -> None:
    compiled_matches(layer_of(case, dtype=torch.float64), case, "aot_eager")


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning"
)  # torch's own import of inductor
@pytest.mark.parametrize(
    "case",
    [
        next(c for c in CASES if c.structure == BTT(gamma=4, phi=2, rho=2)),
        next(c for c in CASES if c.plan.is_padded),
    ],
    ids=lambda c: c.id,
)
def test_inductor_gives_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # a pool of compiler processes takes longer to start than these kernels take to compile
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    compiled_matches(layer_of(case, dtype=torch.float64), case, "inductor")


def test_a_compiled_layer_takes_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    layer = StructuredLinear(8, 12, BTT(gamma=2, phi=3))
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((3,), (5,), (2, 3), (4, 7)):
        x = torch.randn(*shape, 8)
        torch.testing.assert_close(fast(x), layer(x))


# --- devices, copies, states


def test_a_meta_layer_made_real_is_initialised_right_and_touches_only_its_own(case: Case) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(case.in_features, case.in_features)
            self.layer = layer_of(case)
            self.last = nn.Linear(case.out_features, 2)

    with torch.device("meta"):
        model = Model()
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(5)
    model.layer.reset_parameters()
    assert all(torch.isnan(p).all() for part in (model.first, model.last) for p in part.parameters())
    torch.manual_seed(5)
    direct = layer_of(case)
    for name, parameter in model.layer.named_parameters():
        assert torch.equal(parameter, dict(direct.named_parameters())[name])


def test_device_and_dtype_reach_every_tensor(case: Case) -> None:
    for options in ({"device": "meta"}, {"device": torch.device("meta"), "dtype": torch.bfloat16}):
        layer = layer_of(case, **options)
        assert all(p.is_meta for p in layer.parameters())
        assert {p.dtype for p in layer.parameters()} == {options.get("dtype", torch.float32)}
        assert layer.weight.is_meta
        assert layer.dense().is_meta
        assert layer.to_linear().weight.is_meta
        assert layer(torch.empty(3, case.in_features, device="meta", dtype=options.get("dtype"))).is_meta


def test_a_deep_copy_is_equal_and_independent(case: Case) -> None:
    layer = layer_of(case)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, case.in_features)
    before = layer(x)
    assert torch.equal(twin(x), before)
    assert twin.plan == layer.plan
    randomise(twin)
    assert torch.equal(layer(x), before)


def test_a_layer_pickles(case: Case) -> None:
    layer = layer_of(case)
    x = torch.randn(3, case.in_features)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_a_state_dict_and_the_text_of_the_structure_make_the_same_layer(case: Case) -> None:
    layer = layer_of(case)
    randomise(layer)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    structure = case.structure
    if type(structure).__module__.startswith("lamella"):
        structure = parse_structure(repr(structure))
    other = StructuredLinear(case.in_features, case.out_features, structure)
    other.load_state_dict(state)
    x = torch.randn(3, case.in_features)
    assert torch.equal(other(x), layer(x))


def test_a_state_dict_of_another_structure_is_refused() -> None:
    layer = StructuredLinear(8, 8, LowRank(rank=2))
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(StructuredLinear(8, 8, LowRank(rank=3)).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(nn.Linear(8, 8).state_dict())


def test_casting_a_layer_casts_every_parameter(case: Case) -> None:
    layer = layer_of(case)
    for cast, dtype in (
        (layer.double, torch.float64),
        (layer.bfloat16, torch.bfloat16),
        (layer.half, torch.float16),
    ):
        cast()
        assert {p.dtype for p in layer.parameters()} == {dtype}
        assert layer(torch.randn(2, case.in_features, dtype=dtype)).dtype == dtype


# --- to and from nn.Linear


@pytest.mark.parametrize("bias", [True, False])
def test_to_linear_gives_a_real_nn_linear_with_the_factors_gone(case: Case, bias: bool) -> None:
    layer = layer_of(case, bias=bias, dtype=torch.float64)
    randomise(layer)
    linear = layer.eval().to_linear()
    assert type(linear) is nn.Linear
    assert not linear.training
    assert (linear.in_features, linear.out_features) == (case.in_features, case.out_features)
    assert sorted(linear.state_dict()) == ["bias", "weight"][not bias :]
    assert linear.weight.is_contiguous()
    x = torch.randn(4, case.in_features, dtype=torch.float64)
    torch.testing.assert_close(linear(x), layer(x))
    assert all(p.requires_grad and p.is_leaf for p in linear.parameters())


def test_the_bias_of_to_linear_is_its_own() -> None:
    layer = StructuredLinear(8, 8, LowRank(rank=2))
    linear = layer.to_linear()
    assert layer.bias is not None
    assert linear.bias.data_ptr() != layer.bias.data_ptr()


@SPECTRAL
def test_from_linear_returns_a_member_unchanged_with_its_bias(case: Case) -> None:
    linear = nn.Linear(case.in_features, case.out_features, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(case.dense(case.factors()))
    layer = StructuredLinear.from_linear(linear, case.structure)
    x = torch.randn(4, case.in_features, dtype=torch.float64)
    assert relative_error(layer(x), linear(x)) < (1e-2 if case.plan.is_padded else 1e-12)
    assert layer.bias is not None
    assert torch.equal(layer.bias, linear.bias)
    assert layer.bias.data_ptr() != linear.bias.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_from_linear_keeps_dtype_mode_and_absent_bias(dtype: torch.dtype) -> None:
    linear = nn.Linear(8, 12, bias=False, dtype=dtype).eval()
    layer = StructuredLinear.from_linear(linear, BTT(gamma=2, phi=3))
    assert layer.bias is None
    assert not layer.training
    assert {p.dtype for p in layer.parameters()} == {dtype}


def test_from_linear_of_a_frozen_layer_is_frozen() -> None:
    layer = StructuredLinear.from_linear(nn.Linear(8, 8).requires_grad_(False), LowRank(rank=2))
    assert not any(p.requires_grad for p in layer.parameters())
    assert not any(p.requires_grad for p in layer.to_linear().parameters())


def test_from_linear_refuses_weights_that_are_not_finite() -> None:
    linear = nn.Linear(8, 8)
    with torch.no_grad():
        linear.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        StructuredLinear.from_linear(linear, LowRank(rank=2))


def test_a_dense_structure_is_nn_linear_exactly() -> None:
    linear = nn.Linear(6, 9, dtype=torch.float64)
    layer = StructuredLinear.from_linear(linear, Dense())
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x))
    assert torch.equal(layer.to_linear().weight, linear.weight)
    assert torch.equal(ops.dense(layer.plan, list(layer.factors)), linear.weight)
