"""StructuredLinear: nn.Linear with a structured weight."""

import math
from collections.abc import Callable
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamella import ops
from lamella.structures import Structure, project, project_padded, suggest

Init = Literal["mup", "spectral"]
INITS = ("mup", "spectral")


class StructuredLinear(nn.Module):
    """y = W x + b with W a member of `structure`; a drop-in for nn.Linear.

    x: (..., in_features) -> (..., out_features). The parameters are `factors.0`, `factors.1`, ..., each
    (batch, contracted, new) as `plan.factor_shapes` says, and `bias`. While guided there is also `guide`,
    (out_features, in_features), see `guide_`.

    init: "mup" draws each factor with standard deviation sqrt(min(f, g)) / f for its fans f and g
    (arXiv 2410.02117); "spectral" projects a Gaussian matrix (arXiv 2406.16450). init_std is that matrix's
    standard deviation, by default sqrt(min(in, out)) / in. zero_last starts the last factor at zero, as for the last
    layer of a residual branch. The bias starts at zero.

    Raises: ValueError if the structure does not fit the sizes.
    """

    guide: nn.Parameter | None
    guide_alpha: Tensor  # float32 scalar, no buffer: a buffer would be cast by .half() and broadcast by DDP

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Structure,
        bias: bool = True,
        init: Init = "mup",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        init_std: float | None = None,
        zero_last: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(structure, Structure):
            raise ValueError(f"structure must be one like LowRank(rank=192), got {structure!r}")
        check_init(init, init_std)
        self.in_features = in_features
        self.out_features = out_features
        self.structure = structure
        self.plan = structure.plan(in_features, out_features)
        if init == "spectral" and self.plan.num_factors > 2:
            raise ValueError(
                f"init 'spectral' needs at most two factors, {structure!r} has {self.plan.num_factors}"
            )
        self.init, self.init_std, self.zero_last = init, init_std, zero_last
        self.replaced_class: type[nn.Module] = nn.Linear  # what merge_ restores
        self.factors = nn.ParameterList(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in self.plan.factor_shapes
        )
        empty = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.bias = nn.Parameter(empty) if empty is not None else None
        self.register_parameter("guide", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors anew, in float32 (float64 for float64 layers), rounded once; zero the bias.

        A guide, where there is one, becomes the new dense matrix.
        """
        if self.factors[0].is_meta:
            return
        for factor, drawn in zip(self.factors, self._drawn_factors(), strict=True):
            factor.copy_(drawn)
        if self.zero_last:
            self.factors[self.plan.order[-1]].zero_()
        if self.bias is not None:
            self.bias.zero_()
        if self.guide is not None:
            self.guide.copy_(self.dense())

    def _drawn_factors(self) -> list[Tensor]:
        first = self.factors[0]
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        if self.init == "mup":
            return [
                torch.randn(shape, dtype=dtype, device=first.device) * std
                for shape, std in zip(self.plan.factor_shapes, self.plan.mup_std, strict=True)
            ]
        std = self.init_std
        if std is None:
            std = math.sqrt(min(self.in_features, self.out_features)) / self.in_features
        gaussian = torch.randn(self.plan.padded_out, self.plan.padded_in, dtype=dtype, device=first.device)
        return list(project_padded(self.plan, gaussian * std))

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.guide is not None and not self.guide.is_meta:
            self.guide_alpha = self.guide_alpha.to(
                self.guide.device
            )  # moved, never rounded to the layer's dtype
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected an input of shape (..., {self.in_features}), got {tuple(x.shape)}")
        y = ops.apply(self.plan, x, list(self.factors))
        if self.guide is not None:
            y = self.guide_alpha * F.linear(x, self.guide) + (1 - self.guide_alpha) * y
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """NaN everywhere: answers dtype, device and shape for code that only looks, and fails loudly when used.

        The matrix is `dense()`.
        """
        first = self.factors[0]
        return torch.full((), math.nan, dtype=first.dtype, device=first.device).expand(
            self.out_features, self.in_features
        )

    def dense(self) -> Tensor:
        """The structured matrix (out_features, in_features), differentiable and contiguous; no guide in it.

        16-bit factors are multiplied in float32 and the product is rounded once.
        """
        return self._product(torch.float32).to(self.factors[0].dtype)

    def _product(self, dtype: torch.dtype) -> Tensor:
        """The matrix, formed in dtype or in the factors' own, whichever is finer."""
        factors = [f.to(torch.promote_types(f.dtype, dtype)) for f in self.factors]
        with torch.autocast("cpu" if factors[0].is_meta else factors[0].device.type, enabled=False):
            return ops.dense(self.plan, factors)

    @torch.no_grad()
    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """The nn.Linear this layer equals; `dtype` is the layer's own by default, float64 is also formed in it.

        Raises: ValueError while guided, since the guided layer is not structured yet.
        """
        if self.guide is not None:
            raise ValueError("this layer is guided: call remove() on its Guide before merging it")
        first = self.factors[0]
        linear = nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device="meta",
            dtype=dtype or first.dtype,
        )
        product = self._product(torch.float64 if linear.weight.dtype == torch.float64 else torch.float32)
        linear.weight = nn.Parameter(
            product.to(linear.weight.dtype), any(f.requires_grad for f in self.factors)
        )
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.to(linear.weight.dtype, copy=True), self.bias.requires_grad)
        return linear.train(self.training)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, structure: Structure) -> "StructuredLinear":
        """The member of `structure` nearest to a linear layer's weight (Frobenius norm), with its bias.

        Raises: ValueError if the structure does not fit, has no closed-form projection, or a weight is not finite.
        """
        weight = linear.weight
        if weight.is_meta:
            raise ValueError("there are no weights to project on the meta device")
        layer = cls(
            linear.in_features,
            linear.out_features,
            structure,
            linear.bias is not None,
            "mup",
            "meta",
            weight.dtype,
        )
        layer.to_empty(device=weight.device)
        layer.load_projection(weight, linear.bias)
        layer.factors.requires_grad_(weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        return layer.train(linear.training)

    @torch.no_grad()
    def load_projection(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set the factors to the projection of `weight` (out, in), and the bias."""
        for factor, projected in zip(self.factors, project(self.plan, weight), strict=True):
            factor.copy_(projected)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def __repr__(self) -> str:
        guided = ", guided" if self.guide is not None else ""
        return (
            f"StructuredLinear(in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, structure={self.structure!r}{guided})"
        )


def check_init(init: str, init_std: float | None) -> None:
    """Raises: ValueError for an unknown init, or a standard deviation it would not use."""
    if init not in INITS:
        raise ValueError(f"unknown init {init!r}{suggest(str(init), INITS)}. Known: {', '.join(INITS)}.")
    if init_std is not None and (init != "spectral" or not 0 < init_std < math.inf):
        raise ValueError(
            f"init_std is a positive number for init 'spectral' only, got {init_std!r} with {init!r}"
        )
