"""flexgemm.torch.nn: what is refused, and by which name; and the less usual that is not."""

from __future__ import annotations

import re

import pytest
from test_nn import sparse

torch = pytest.importorskip("torch", reason="torch not installed")
from torch.nn.utils import prune  # noqa: E402

import flexgemm.torch.nn as fnn  # noqa: E402

# ---- sizes of layers ----


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("kernel_size", (3, 3)),
        ("kernel_size", 3.0),
        ("kernel_size", 0),
        ("stride", 0),
        ("stride", "2"),
        ("padding", -1),
        ("dilation", (1, 0, 1)),
        ("output_padding", -1),
    ],
)
def test_sizes_of_a_convolution(name, wrong):
    sizes = {"kernel_size": 3, name: wrong}
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        fnn.SparseConvTranspose3d(4, 8, **sizes)
    if name in ("kernel_size", "dilation"):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            fnn.SubMConv3d(4, 8, **sizes)


@pytest.mark.parametrize("name, wrong", [("kernel_size", (2, 2)), ("stride", 0), ("padding", -1)])
def test_sizes_of_a_pooling(name, wrong):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        fnn.SparsePool3d(**{"kernel_size": 2, name: wrong})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fnn.SubMConv3d(4, 8, (3, 9, 3)), "kernel_size: expected 1 to 7, got 9"),
        (lambda: fnn.SparsePool3d(8), "kernel_size: expected 1 to 7, got 8"),
        (lambda: fnn.SparsePool3d(2, mode="avg"), "mode: expected 'max', 'mean' or 'sum', got 'avg'"),
        (lambda: fnn.GlobalPool("avg"), "mode: expected 'max', 'mean' or 'sum', got 'avg'"),
        (lambda: fnn.SubMConv3d(4, 8, precision="fp16"), "precision: expected 'ieee' or 'tf32', got 'fp16'"),
        (lambda: fnn.GroupedLinear(-1, 4, 8), "num_groups: expected at least 0, got -1"),
    ],
)
def test_what_no_call_could_take_is_refused_when_a_layer_is_made(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_kinds_of_options_of_a_layer():
    with pytest.raises(TypeError, match="^mode: expected a str, got NoneType$"):
        fnn.GlobalPool(None)
    with pytest.raises(TypeError, match="^in_features: expected an int, got str$"):
        fnn.GroupedLinear(2, "4", 8)


@pytest.mark.parametrize("function", [torch.nn.ReLU(), torch.nn.Linear(4, 4), lambda x: torch.cat([x, x], 1)])
def test_functions_of_torch_say_what_to_take_instead(function):
    x = sparse(20, 4)
    with pytest.raises(TypeError, match=r"^\w+: expected tensors, got a SparseTensor: take a module of flexgemm"):
        function(x)


def test_voxels_from_nowhere_have_no_way_back():
    pooled = fnn.SparsePool3d(2)(sparse(20, 4))
    for x in (sparse(20, 4), pooled.prune(pooled.feats[:, 0] > -9), fnn.SparseTensor.collate([pooled])):
        with pytest.raises(ValueError, match="got one on voxels that were given, pruned or collated$"):
            fnn.SparseUpsample3d()(x)


def test_a_sparse_tensor_is_not_exported():
    with pytest.raises(TypeError, match="^expected tensors to go into and out of a traced program, got a Sparse"):
        torch.export.export(fnn.ReLU(), (sparse(20, 4),))


def test_sizes_of_other_kinds_of_int():
    numpy = pytest.importorskip("numpy")
    layer = fnn.SparseConv3d(4, 8, numpy.int64(3), numpy.array([2, 2, 1]), padding=[1, 0, 1])
    assert (layer.kernel_size, layer.stride, layer.padding) == ((3, 3, 3), (2, 2, 1), (1, 0, 1))


LAYERS = {
    "SubMConv3d(4, 8, kernel_size=(3, 3, 3))": lambda: fnn.SubMConv3d(4, 8),
    "SubMConv3d(4, 8, kernel_size=(3, 1, 3), dilation=(2, 2, 2), groups=2, bias=False)": lambda: fnn.SubMConv3d(
        4, 8, (3, 1, 3), dilation=2, groups=2, bias=False
    ),
    "SparseConv3d(4, 8, kernel_size=(3, 3, 3))": lambda: fnn.SparseConv3d(4, 8, 3),
    "SparseConv3d(4, 8, kernel_size=(3, 3, 3), stride=(2, 2, 2), padding=(1, 0, 1))": lambda: fnn.SparseConv3d(
        4, 8, 3, 2, (1, 0, 1)
    ),
    "SparseConvTranspose3d(4, 8, kernel_size=(2, 2, 2), stride=(2, 2, 2), output_padding=(1, 0, 1))": lambda: (
        fnn.SparseConvTranspose3d(4, 8, 2, 2, output_padding=(1, 0, 1))
    ),
    "SparsePool3d((2, 2, 2), stride=(2, 2, 2), padding=(0, 0, 0), mode='max')": lambda: fnn.SparsePool3d(2),
    "GlobalPool(mode='max')": fnn.GlobalPool,
    "GroupedLinear(3, 16, 8, bias=True, fp8=False)": lambda: fnn.GroupedLinear(3, 16, 8),
    "Float8GroupedLinear(3, 16, 8, bias=False)": lambda: fnn.GroupedLinear(3, 16, 8, bias=False).frozen(),
}


@pytest.mark.parametrize("text", LAYERS)
def test_a_layer_says_what_it_is(text):
    """And what it is by default."""
    assert repr(LAYERS[text]()) == text


# ---- tensors ----


@pytest.mark.parametrize("shape", [(79,), (81,), (80, 1)])
def test_a_mask_of_other_voxels(shape):
    """Which indexing would take, or on a GPU end the process by."""
    with pytest.raises(ValueError, match=r"^mask: expected \(80,\), one for each voxel, got"):
        sparse().prune(torch.ones(shape, dtype=torch.bool))


def test_dense_tensors_of_other_shapes():
    dense = torch.ones(2, 3, 4, 5, 6)
    with pytest.raises(ValueError, match=r"^dense: expected \(B, C, W, H, D\), got \(3, 4, 5, 6\)"):
        fnn.SparseTensor.from_dense(dense[0])
    for shape in ((2, 4, 5, 7), (2, 4, 5, 5), (2, 3, 4, 5, 6), (4, 5, 6)):
        with pytest.raises(ValueError, match=r"^mask: expected \(2, 4, 5, 6\) to match dense, got"):
            fnn.SparseTensor.from_dense(dense, torch.ones(shape))


def test_nothing_to_join():
    with pytest.raises(ValueError, match="^tensors: expected at least one"):
        fnn.SparseTensor.collate([])
    with pytest.raises(ValueError, match="^tensors: expected at least one"):
        fnn.cat([])


def test_what_is_no_tensor():
    x = sparse()
    for feats, coords, name in (([1.0], x.coords, "feats"), (x.feats, [[0, 0, 0, 0]], "coords")):
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got list"):
            fnn.SparseTensor(feats, coords, x.shape)
    with pytest.raises(TypeError, match="^sites: expected those of a SparseTensor, got int$"):
        fnn.SparseTensor(x.feats, sites=3)
    with pytest.raises(TypeError, match="^dense: expected a torch.Tensor, got numpy.ndarray$"):
        fnn.SparseTensor.from_dense(x.dense().numpy())
    with pytest.raises(TypeError, match="^mask: expected a torch.Tensor, got list$"):
        fnn.SparseTensor.from_dense(x.dense(), [True])


# ---- normalisation ----


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", [lambda **how: fnn.GroupNorm(2, 8, **how), lambda **how: fnn.InstanceNorm(8, **how)])
def test_norms_of_other_channels(kind, affine):
    with pytest.raises(ValueError, match="^x: expected 8 channels, got 4"):
        kind(affine=affine)(sparse(channels=4))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_norms_are_of_floats(dtype):
    x = sparse(channels=4)
    with pytest.raises(TypeError, match=f"^x: expected features of floats, got {dtype}$"):
        fnn.GroupNorm(2, 4)(x.replace(x.feats.to(dtype)))


def test_norms_train_on_voxels_of_inference_mode():
    x = sparse(channels=4)
    with torch.inference_mode():
        pruned = x.prune(x.feats[:, 0] > 0)
    feats = torch.randn(len(pruned), 4, requires_grad=True)
    same = fnn.SparseTensor(feats, pruned.coords.clone(), pruned.shape)
    given = [pruned.replace(feats), same]
    first, second = (torch.autograd.grad(fnn.GroupNorm(2, 4)(y).feats.square().sum(), feats) for y in given)
    assert torch.equal(*first, *second)


def test_a_norm_with_a_weight_alone():
    """As later versions of torch can make it."""
    norm, x = fnn.GroupNorm(2, 4), sparse(channels=4)
    torch.nn.init.uniform_(norm.weight)
    expected = norm(x).feats
    norm.register_parameter("bias", None)
    assert torch.equal(norm(x).feats, expected)


# ---- inference in FP8 ----


class Twice(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_parametrized_layer_is_frozen():
    """With the weight as it is computed; the layer itself stays as it was."""
    layer, x = fnn.SubMConv3d(16, 16), sparse(channels=16)
    plain = fnn.SubMConv3d(16, 16)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    plain.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    frozen = layer.frozen()
    assert frozen.weight.dtype is torch.float8_e4m3fn
    assert not list(frozen.parameters())
    assert torch.equal(frozen(x).feats, plain.frozen()(x).feats)
    assert torch.nn.utils.parametrize.is_parametrized(layer, "weight")
    assert torch.equal(layer(x).feats, plain(x).feats)


def test_a_bias_alone_may_be_parametrized():
    layer, x = fnn.SubMConv3d(16, 16), sparse(channels=16)
    plain = fnn.SubMConv3d(16, 16)
    plain.load_state_dict({"weight": layer.weight.detach(), "bias": 2 * layer.bias.detach()})
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", Twice())
    assert torch.equal(layer(x).feats, plain(x).feats)
    assert torch.equal(layer.frozen()(x).feats, plain.frozen()(x).feats)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_frozen_experts_stay_fp8(dtype):
    """When a network changes its dtype: weights and scales stay, the bias does not."""
    frozen = fnn.GroupedLinear(3, 16, 24).frozen()
    weight, scale = frozen.weight.clone(), frozen.weight_scale.clone()
    moved = torch.nn.Sequential(frozen).to(dtype)[0]
    assert torch.equal(moved.weight.view(torch.uint8), weight.view(torch.uint8))
    assert (moved.weight.dtype, moved.bias.dtype) == (torch.float8_e4m3fn, dtype)
    assert torch.equal(moved.weight_scale, scale) and moved.weight_scale.dtype is torch.float32


def test_frozen_experts_leave_the_meta_device():
    wanted = fnn.GroupedLinear(3, 16, 24).frozen()
    frozen = fnn.GroupedLinear(3, 16, 24).frozen().to("meta").to_empty(device="cpu")
    frozen.load_state_dict(wanted.state_dict())
    x, ends = torch.randn(9, 16), torch.tensor([2, 2, 9], dtype=torch.int32)
    assert torch.equal(frozen(x, ends), wanted(x, ends))


@pytest.mark.parametrize(
    "row, shape, message",
    [
        ((0, -1, 3, 3), (1, 4, 4, 4), r"coords: row 1 is \(0, -1, 3, 3\), outside shape \(1, 4, 4, 4\)"),
        ((1, 1, 1, 2), (1, 4, 4, 4), r"coords: row 1 is \(1, 1, 1, 2\), outside shape \(1, 4, 4, 4\)"),
        ((0, 0, 4, 0), (1, 4, 4, 4), r"coords: row 1 is \(0, 0, 4, 0\), outside shape \(1, 4, 4, 4\)"),
        ((0, 1, 1, 2), (0, 4, 4, 4), r"shape: expected four positive ints \(B, W, H, D\), got \(0, 4, 4, 4\)"),
        ((0, 1, 1, 2), (1, "a", 4, 4), r"shape: expected four positive ints"),
        ((0, 1, 1, 2), (1, 4.5, 4, 4), r"shape: expected four positive ints"),
        ((0, 1, 1, 2), (4, 4, 4), r"shape: expected four positive ints"),
        ((0, 1, 1, 2), 4, r"shape: expected four positive ints"),
        ((0, 1, 1, 2), None, r"shape: expected four positive ints"),
    ],
)
def test_voxels_lie_in_their_grid(row, shape, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        fnn.SparseTensor(torch.ones(2, 1), torch.tensor([(0, 0, 0, 0), row], dtype=torch.int32), shape)


def test_masks_are_not_indices():
    x = sparse()
    for mask in (torch.arange(len(x)), torch.ones(len(x), dtype=torch.uint8)):
        with pytest.raises(TypeError, match="^mask: expected bool, got torch."):
            x.prune(mask)
    with pytest.raises(TypeError, match="^mask: expected a torch.Tensor, got list$"):
        x.prune([True] * len(x))


@pytest.mark.parametrize(
    "module",
    [
        fnn.SubMConv3d(5, 4),
        fnn.SparseConv3d(5, 4, 2, 2),
        fnn.SparseInverseConv3d(5, 4, 2),
        fnn.SparsePool3d(2),
        fnn.SparseUpsample3d(),
        fnn.GlobalPool(),
        fnn.GroupNorm(1, 5),
        fnn.Features(torch.nn.Softplus()),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_take_sparse_tensors(module):
    with pytest.raises(TypeError, match=r"^x: expected a SparseTensor, got torch.Tensor$"):
        module(sparse().feats)


def test_what_is_joined_are_sparse_tensors():
    x = sparse()
    for function in (fnn.cat, fnn.SparseTensor.collate):
        for other, got in ((x.feats, "torch.Tensor"), (2.0, "float")):
            with pytest.raises(TypeError, match=f"^tensors: expected a SparseTensor, got {got}$"):
                function([x, other])
        with pytest.raises(TypeError, match="^tensors: expected a sequence of SparseTensors, got .*SparseTensor$"):
            function(x)
    assert torch.equal(fnn.cat(y for y in (x, x)).feats, torch.cat([x.feats, x.feats], dim=1))
    assert len(fnn.SparseTensor.collate(y for y in (x, x))) == 2 * len(x)
    with pytest.raises(ValueError, match=r"^tensors: expected as many channels in each, got \[2, 5\]$"):
        fnn.SparseTensor.collate([x, x.replace(x.feats[:, :2])])
    with pytest.raises(TypeError, match="^onto: expected a SparseTensor, got torch.Tensor$"):
        fnn.SparseConv3d(5, 4, 2, 2)(x, onto=x.coords)


@pytest.mark.parametrize("kind", [fnn.SubMConv3d, fnn.SparseConv3d, fnn.SparseInverseConv3d])
def test_channels_and_groups_are_positive_ints(kind):
    with pytest.raises(ValueError, match="^in_channels: expected at least 1, got 0$"):
        kind(0, 4, 3)
    with pytest.raises(TypeError, match="^groups: expected an int, got float$"):
        kind(4, 4, 3, groups=2.0)
    assert torch.nn.utils.skip_init(kind, 4, 8, 3).weight.shape == (8, 3, 3, 3, 4)
    assert {parameter.dtype for parameter in kind(4, 8, 3, dtype=torch.float16).parameters()} == {torch.float16}


def test_the_third_argument_of_torch_s_instance_norm_is_none_here():
    with pytest.raises(TypeError, match="positional arguments"):
        fnn.InstanceNorm(4, 1e-5, 0.1)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_layer_of_which_a_hook_computes_something_is_not_frozen(name):
    layer = fnn.SubMConv3d(4, 8)
    prune.l1_unstructured(layer, name, 0.3)
    with pytest.raises(ValueError, match=f"^{name}: expected a parameter or a parametrization, got a tensor computed"):
        layer.frozen()
    prune.remove(layer, name)
    assert layer.frozen().weight.dtype is torch.float8_e4m3fn


def test_the_default_device_of_torch_is_not_that_of_the_voxels():
    x = sparse()
    with torch.device("meta"):
        assert fnn.SparseTensor(x.feats, x.coords, x.shape).device == x.device
        assert fnn.SparseTensor.from_dense(x.dense()).device == x.device


def test_experts_without_inputs_and_of_what_is_no_tensor():
    experts, ends = fnn.GroupedLinear(2, 0, 8), torch.tensor([3, 10])
    assert torch.equal(experts(torch.empty(10, 0), ends)[:3], experts.bias[:1].expand(3, 8))
    plain = fnn.GroupedLinear(2, 16, 8)
    for layer in (plain, fnn.GroupedLinear(2, 16, 8, fp8=True), plain.frozen()):
        with pytest.raises(TypeError, match="^x: expected a torch.Tensor, got list$"):
            layer([1.0], ends)
        for shape in (10, 15), (2, 5, 16):
            with pytest.raises(ValueError, match=rf"^x: expected \(M, 16\), got {re.escape(str(shape))}$"):
                layer(torch.ones(shape), ends)
        with pytest.raises(TypeError, match="^offsets: expected dtype int32 or int64, got float32$"):
            layer(torch.ones(10, 16), ends.float())
    with pytest.raises(TypeError, match="^weight: expected dtype float16 to match x, got float32$"):
        plain(torch.ones(10, 16).half(), ends)


def test_layers_leave_common_names_to_those_who_derive_from_them():
    class Scaled(fnn.SubMConv3d):
        def __init__(self, *channels):
            super().__init__(*channels)
            self.scale = torch.nn.Parameter(torch.full((channels[1],), 2.0))

        def forward(self, x):
            y = super().forward(x)
            return y.replace(y.feats * self.scale)

    x, layer, plain = sparse(), Scaled(5, 4), fnn.SubMConv3d(5, 4)
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert torch.equal(layer(x).feats, 2 * plain(x).feats)
