"""State dicts of other libraries: converters against convolutions of the layouts that they convert."""

from __future__ import annotations

import numpy as np
import pytest
from test_nn import KERNELS, at_voxels, by_torch, close, sparse

torch = pytest.importorskip("torch", reason="torch not installed")
import flexgemm.torch.nn as fnn  # noqa: E402


def names(model):
    return {name: torch.randn_like(value) for name, value in model.state_dict().items() if value.is_floating_point()}


def expect_loaded(model, state, x):
    model.load_state_dict(state, strict=False)
    layer = model[0]
    close(layer(x).feats, by_torch(x, layer.weight, layer.bias))


def offsets_x_fastest(kernel_size):
    """How torchsparse (odd volumes) and MinkowskiEngine number the kernel: (i, j, k) of each offset."""
    return [
        (i, j, k) for k in range(kernel_size[2]) for j in range(kernel_size[1]) for i in range(kernel_size[0])
    ]  # fmt: skip


def gathered(x, kernel, bias, kernel_size):
    """out = sum over offsets of rows(x + offset) . kernel[v], by their definition, in float64."""
    padding = [size // 2 for size in kernel_size]
    grid = torch.nn.functional.pad(x.dense().double(), [p for size in padding[::-1] for p in (size, size)])
    out = 0
    for v, (i, j, k) in enumerate(offsets_x_fastest(kernel_size)):
        b, *xyz = x.coords.long().unbind(1)
        rows = grid.permute(0, 2, 3, 4, 1)[b, xyz[0] + i, xyz[1] + j, xyz[2] + k]
        out = out + rows @ kernel[v].double()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("kernel_size", KERNELS)
@pytest.mark.parametrize("layout", ["KRSC", "RSKC", "RSCK"])
def test_from_spconv(kernel_size, layout):
    """spconv's weights are torch's Conv3d weights with channels moved: (K) out, (RS) kernel, (C) in."""
    x, model = sparse(), torch.nn.Sequential(fnn.SubMConv3d(5, 7, kernel_size, precision="ieee"), fnn.ReLU())
    conv = torch.randn(7, 5, *kernel_size)  # torch's: out, in, kernel
    order = {"KRSC": (0, 2, 3, 4, 1), "RSKC": (2, 3, 4, 0, 1), "RSCK": (2, 3, 4, 1, 0)}[layout]
    state = {"0.weight": conv.permute(order), "0.bias": torch.randn(7)}
    model.load_state_dict(fnn.from_spconv(state, model, layout))
    padding = [size // 2 for size in kernel_size]
    dense = torch.nn.functional.conv3d(x.dense().double(), conv.double(), state["0.bias"].double(), padding=padding)
    close(model[0](x).feats, at_voxels(dense, x))
    with pytest.raises(ValueError, match="layout"):
        fnn.from_spconv(state, model, "CKRS")


@pytest.mark.parametrize("kernel_size", [*KERNELS, (1, 1, 1)])
def test_from_torchsparse(kernel_size):
    x, volume = sparse(), int(np.prod(kernel_size))
    model = torch.nn.Sequential(fnn.SubMConv3d(5, 7, kernel_size, precision="ieee"), fnn.BatchNorm(7))
    kernel, bias = torch.randn(volume, 5, 7), torch.randn(7)
    norm = {"1." + name: value for name, value in names(model[1]).items()}
    state = {"0.kernel": kernel if volume > 1 else kernel[0], "0.bias": bias, **norm}
    model.load_state_dict(fnn.from_torchsparse(state, model), strict=False)
    close(model[0](x).feats, gathered(x, kernel, bias, kernel_size))
    assert torch.equal(model[1].weight, norm["1.weight"])


@pytest.mark.parametrize("kernel_size", [*KERNELS, (1, 1, 1)])
def test_from_minkowski(kernel_size):
    x, volume = sparse(), int(np.prod(kernel_size))
    model = torch.nn.Sequential(fnn.SubMConv3d(5, 7, kernel_size, precision="ieee"), fnn.BatchNorm(7), fnn.Linear(7, 3))
    kernel, bias = torch.randn(volume, 5, 7), torch.randn(7)
    state = {"0.kernel": kernel if volume > 1 else kernel[0], "0.bias": bias[None]}
    state |= {"1.bn." + name: value for name, value in model[1].state_dict().items()}
    state |= {"2.linear." + name: value for name, value in names(model[2]).items()}
    model.load_state_dict(fnn.from_minkowski(state, model))
    close(model[0](x).feats, gathered(x, kernel, bias, kernel_size))
    assert torch.equal(model[2].weight, state["2.linear.weight"])


@pytest.mark.parametrize("kernel_size", [(2, 2, 2), (3, 2, 1)])
def test_even_kernels_of_strided_layers_are_converted(kernel_size):
    """torchsparse counts them z fastest, MinkowskiEngine x fastest; both begin at o * stride."""
    x, model = sparse(), torch.nn.Sequential(fnn.SparseConv3d(5, 7, kernel_size, 2, bias=False, precision="ieee"))
    kernel = torch.randn(*kernel_size, 5, 7)  # by x, y, z
    y = model[0](x)
    dense = torch.nn.functional.conv3d(x.dense().double(), kernel.permute(4, 3, 0, 1, 2).double(), stride=2)
    z_fastest, x_fastest = kernel.reshape(-1, 5, 7), kernel.permute(2, 1, 0, 3, 4).reshape(-1, 5, 7)
    for convert, stored in ((fnn.from_torchsparse, z_fastest), (fnn.from_minkowski, x_fastest)):
        model.load_state_dict(convert({"0.kernel": stored}, model))
        close(model[0](x).feats, at_voxels(dense, y))


def test_strided_layers_onto_the_voxels_of_minkowski():
    """Which are those of the inputs, divided by the stride; an odd kernel there begins K // 2 before them."""
    x, model = sparse(), torch.nn.Sequential(fnn.SparseConv3d(5, 7, 3, 2, 1, bias=False, precision="ieee"))
    x = fnn.SparseTensor(x.feats, x.coords, (x.batch_size, 8, 8, 8))
    kernel = torch.randn(3, 3, 3, 5, 7)  # by x, y, z
    model.load_state_dict(fnn.from_minkowski({"0.kernel": kernel.permute(2, 1, 0, 3, 4).reshape(27, 5, 7)}, model))
    divided = torch.unique(x.coords // torch.tensor([1, 2, 2, 2], dtype=torch.int32), dim=0)
    pooled = fnn.SparsePool3d(2)(x)
    y = model[0](x, onto=pooled)
    assert torch.equal(torch.unique(y.coords, dim=0), divided)
    assert len(y) < len(model[0](x))
    dense = torch.nn.functional.conv3d(x.dense().double(), kernel.permute(4, 3, 0, 1, 2).double(), stride=2, padding=1)
    close(y.feats, at_voxels(dense, y))
    shortcut = fnn.SparseConv3d(5, 7, 1, 2, bias=False)(x, onto=pooled)
    assert (y + shortcut).feats.shape == (len(divided), 7)
    assert torch.equal(fnn.SparseInverseConv3d(7, 5, 2)(y).coords, x.coords)


def test_what_cannot_be_converted_says_so():
    model, mixed = (torch.nn.Sequential(fnn.SubMConv3d(5, 7, size)) for size in (2, (3, 1, 2)))
    for convert in (fnn.from_torchsparse, fnn.from_minkowski):
        with pytest.raises(ValueError, match="even"):
            convert({"0.kernel": torch.zeros(8, 5, 7)}, model)
        with pytest.raises(ValueError, match=r"^kernel_size: \(3, 1, 2\) is even"):
            convert({"0.kernel": torch.zeros(6, 5, 7)}, mixed)
        with pytest.raises(ValueError, match="0.kernel"):
            convert({"0.kernel": torch.zeros(27, 5, 7)}, model)


def test_kernels_of_other_channels_are_refused():
    """Also of as many numbers."""
    model = torch.nn.Sequential(fnn.SubMConv3d(4, 8, bias=False))
    for convert in (fnn.from_torchsparse, fnn.from_minkowski):
        with pytest.raises(ValueError, match=r"^0.kernel: expected \(V, Ci, Co\) = \(27, 4, 8\), got \(27, 8, 4\)$"):
            convert({"0.kernel": torch.zeros(27, 8, 4)}, model)


def test_channelwise_kernels_of_minkowski():
    """(V, C)."""
    model, kernel = torch.nn.Sequential(fnn.SubMConv3d(5, 5, groups=5, bias=False)), torch.randn(27, 5)
    weight = fnn.from_minkowski({"0.kernel": kernel}, model)["0.weight"]
    assert torch.equal(weight.permute(3, 2, 1, 0, 4), kernel.reshape(3, 3, 3, 5, 1))


def test_a_layer_is_converted_under_each_of_its_names():
    layer = fnn.SubMConv3d(3, 3, bias=False)
    model, weight = torch.nn.ModuleDict({"a": layer, "b": layer}), torch.randn(3, 3, 3, 3, 3)
    model.load_state_dict(fnn.from_spconv({"a.weight": weight, "b.weight": weight}, model, "RSCK"))
    assert torch.equal(layer.weight, weight.permute(4, 0, 1, 2, 3))
    kernel = weight.reshape(27, 3, 3)
    model.load_state_dict(fnn.from_torchsparse({"a.kernel": kernel, "b.kernel": kernel}, model))


def test_a_model_may_be_one_layer():
    """Whose entries have no prefix."""
    conv, kernel = fnn.SubMConv3d(5, 7, bias=False), torch.randn(27, 5, 7)
    inside = fnn.from_minkowski({"0.kernel": kernel}, torch.nn.Sequential(conv))
    for convert in (fnn.from_torchsparse, fnn.from_minkowski):
        state = convert({"kernel": kernel}, conv)
        assert [*state] == ["weight"] and torch.equal(state["weight"], inside["0.weight"])


def test_instance_norms_of_minkowski():
    """Whose parameters are (1, C)."""
    model = torch.nn.Sequential(fnn.SubMConv3d(4, 6, bias=False), fnn.InstanceNorm(6, affine=True))
    state = {"0.kernel": torch.randn(27, 4, 6), "1.weight": torch.rand(1, 6), "1.bias": torch.rand(1, 6)}
    model.load_state_dict(fnn.from_minkowski(state, model))
    close(model[1].weight, state["1.weight"][0])
    close(model[1].bias, state["1.bias"][0])
