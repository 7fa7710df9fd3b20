"""flexgemm.torch.nn: sparse tensors and modules against torch on dense grids."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scenes

torch = pytest.importorskip("torch", reason="torch not installed")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import flexgemm.torch.nn as fnn  # noqa: E402

KERNELS = [(3, 3, 3), (5, 1, 3)]


def sparse(n=80, channels=5, batch=2, device="cpu"):
    coords, shape = scenes.scene(n, batch=batch)
    torch.manual_seed(0)
    return fnn.SparseTensor(torch.randn(n, channels, device=device), torch.from_numpy(coords).to(device), shape)


def at_voxels(dense, x):
    """The rows (N, C) of a dense (B, C, W, H, D) tensor at the voxels of x."""
    return dense.permute(0, 2, 3, 4, 1)[x.coords.long().unbind(1)]


def by_torch(x, weight, bias, dilation=(1, 1, 1)):
    """The convolution of the dense grid by torch, in float64: weight (Co, Kw, Kh, Kd, Ci), odd."""
    kernel = weight.double().permute(0, 4, 1, 2, 3)
    padding = [size // 2 * d for size, d in zip(kernel.shape[2:], dilation, strict=True)]
    bias = None if bias is None else bias.double()
    dense = torch.nn.functional.conv3d(x.dense().double(), kernel, bias, padding=padding, dilation=dilation)
    return at_voxels(dense, x)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


# ---- tensors ----


def test_dense_and_back(device):
    x = sparse(device=device)
    dense = x.dense()
    assert dense.shape == (x.batch_size, 5, *x.shape[1:])
    again = fnn.SparseTensor.from_dense(dense)
    assert (again.coords.dtype, again.shape, len(again)) == (torch.int32, x.shape, len(x))
    assert torch.equal(again.dense(), dense)
    assert torch.equal(at_voxels(dense, again), again.feats)
    dense[:, 0] = 0  # of a voxel any channel counts
    assert torch.equal(fnn.SparseTensor.from_dense(dense).coords, again.coords)
    everything = fnn.SparseTensor.from_dense(dense, mask=torch.ones_like(dense[:, 0]))
    assert len(everything) == np.prod(x.shape)
    x.feats.requires_grad_()
    x.dense().square().sum().backward()
    torch.testing.assert_close(x.feats.grad, 2 * x.feats.detach())


def test_batches_are_split_and_joined(device):
    x = sparse(batch=3, device=device)
    parts = x.split()
    assert [len(part) for part in parts] == x.batch_counts().tolist()
    assert all(part.shape == (1, *x.shape[1:]) for part in parts)
    assert torch.equal(torch.cat([part.dense() for part in parts]), x.dense())
    assert torch.equal(fnn.SparseTensor.collate(parts).dense(), x.dense())
    batches = [x, parts[1], x]
    assert torch.equal(fnn.SparseTensor.collate(batches).dense(), torch.cat([each.dense() for each in batches]))
    late = fnn.SparseTensor(x.feats, x.coords, (5, *x.shape[1:]))  # two samples without voxels
    assert late.batch_counts().tolist() == [*x.batch_counts().tolist(), 0, 0]
    assert [len(part) for part in late.split()] == late.batch_counts().tolist()
    larger = fnn.SparseTensor(parts[0].feats, parts[0].coords, (1, 20, 20, 20))
    for both in ([parts[1], larger], [larger, parts[1]]):
        assert fnn.SparseTensor.collate(both).shape == (2, 20, 20, 20)


def test_maps_are_shared_by_tensors_on_the_same_voxels(device):
    x = sparse(device=device)
    y = x.replace(x.feats * 2)
    nmap = x.sites.neighbor_map((3, 3, 3), (1, 1, 1))
    assert y.sites.neighbor_map((3, 3, 3), (1, 1, 1)) is nmap
    assert y.sites.neighbor_map((3, 3, 3), (2, 2, 2)) is not nmap
    assert torch.equal((x + y).feats, 3 * x.feats)
    assert torch.equal((1 + 2 * x).feats, 2 * x.feats + 1)
    assert torch.equal((-x * y / 2 - x).feats, -x.feats * x.feats - x.feats)
    both = fnn.cat([x, y, x])
    assert torch.equal(both.feats, torch.cat([x.feats, y.feats, x.feats], dim=1)) and both.sites is x.sites
    for wrong in (lambda: x + sparse(device=device), lambda: fnn.cat([x, sparse(device=device)])):
        with pytest.raises(ValueError, match="same one"):
            wrong()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("affine", [False, True])
def test_group_norm_is_torch_s_on_each_sample(device, affine, groups, dtype):
    x = sparse(120, 6, batch=3, device=device)
    x = fnn.SparseTensor(x.feats + 5, x.coords[torch.randperm(120)], x.shape)  # samples in any order
    layer = fnn.GroupNorm(groups, 6, affine=affine, device=device)
    if groups == 6:
        layer = fnn.InstanceNorm(6, affine=affine, device=device)
    if affine:
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
    feats = x.feats.to(dtype).requires_grad_()
    y = layer(x.replace(feats))
    assert y.dtype is dtype and y.sites is x.sites
    grad_out = torch.randn_like(y.feats)
    parameters = [*layer.parameters()]
    gradients = torch.autograd.grad(y.feats, [feats, *parameters], grad_out)
    exact = [t.detach().double().requires_grad_() for t in (feats, *parameters)]
    expected = torch.empty(120, 6, dtype=torch.float64, device=device)
    for sample in range(3):
        rows = x.coords[:, 0] == sample
        of_sample = exact[0][rows].t()[None]  # (1, C, voxels)
        expected[rows] = torch.nn.functional.group_norm(of_sample, groups, *exact[1:])[0].t()
    close(y.feats, expected, 1e-5 if dtype is torch.float32 else 2e-3)
    for got, want in zip(gradients, torch.autograd.grad(expected, exact, grad_out.double()), strict=True):
        close(got, want, 1e-4 if dtype is torch.float32 else 1e-2)


def test_what_keeps_a_norm_from_dividing_by_nothing_is_that_of_the_layer(device):
    x = sparse(channels=6, batch=1, device=device)
    expected = torch.nn.functional.group_norm(x.feats.t()[None], 2, eps=0.5)[0].t()
    close(fnn.GroupNorm(2, 6, eps=0.5, device=device)(x).feats, expected)


def test_instance_norm_is_torch_s_unless_told_otherwise():
    ours, theirs = fnn.InstanceNorm(6), torch.nn.InstanceNorm3d(6)
    assert (ours.eps, [*ours.parameters()]) == (theirs.eps, [*theirs.parameters()])


def test_voxels_are_pruned(device):
    x = sparse(device=device)
    mask = x.feats[:, 0] > 0
    pruned = x.prune(mask)
    assert torch.equal(pruned.feats, x.feats[mask]) and torch.equal(pruned.coords, x.coords[mask])
    assert pruned.shape == x.shape and len(x.prune(torch.zeros_like(mask))) == 0
    assert fnn.SubMConv3d(5, 3).to(device)(pruned).feats.shape == (int(mask.sum()), 3)


def test_tensors_move_and_change_dtype(device):
    x = sparse()
    half = x.to(torch.float16)
    assert half.dtype is torch.float16
    assert half.sites is x.sites
    moved = x.to(device, torch.bfloat16)
    assert (moved.dtype, moved.device.type, moved.coords.device.type) == (torch.bfloat16, device.type, device.type)
    assert (moved.sites is x.sites) == (device.type == "cpu")


def test_a_tensor_says_what_it_is():
    x = fnn.SparseTensor(torch.zeros(2, 3).half(), torch.zeros(2, 4, dtype=torch.int32), (1, 4, 5, 6))
    assert repr(x) == "SparseTensor(2 voxels in (1, 4, 5, 6), 3 channels, torch.float16, cpu)"


def test_wrong_tensors_are_refused():
    feats, coords = torch.zeros(5, 3), torch.zeros(5, 4, dtype=torch.int32)
    for wrong in ((feats, coords[:4]), (feats[0], coords)):
        with pytest.raises(ValueError, match=r"^feats: expected \([45], C\) to match the voxels, got"):
            fnn.SparseTensor(*wrong, (1, 4, 4, 4))
    with pytest.raises(ValueError, match=r"^coords: expected \(N, 4\)"):
        fnn.SparseTensor(feats, coords[:, :3], (1, 4, 4, 4))
    with pytest.raises(TypeError, match="coords"):
        fnn.SparseTensor(feats, coords.long(), (1, 4, 4, 4))
    with pytest.raises(ValueError, match="shape"):
        fnn.SparseTensor(feats, coords, (4, 4, 4))


# ---- modules ----


@pytest.mark.parametrize("kernel_size", KERNELS)
@pytest.mark.parametrize("dilation", [1, (1, 2, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_submanifold_convolution_is_torch_s_on_the_dense_grid(device, kernel_size, dilation, bias):
    x = sparse(device=device)
    layer = fnn.SubMConv3d(5, 7, kernel_size, dilation=dilation, bias=bias, precision="ieee", device=device)
    x.feats.requires_grad_()
    y = layer(x)
    assert y.sites is x.sites
    leaves = [x.feats, *layer.parameters()]
    expected = by_torch(x, layer.weight, layer.bias, layer.dilation)
    close(y.feats, expected)
    gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (y.feats, expected))
    for got, want in zip(*gradients, strict=True):
        close(got, want, 1e-4)


@pytest.mark.parametrize("groups", [2, 6])
def test_groups_of_channels(device, groups):
    x = sparse(channels=6, device=device)
    layer = fnn.SubMConv3d(6, 12, groups=groups, precision="ieee", device=device)
    kernel, bias = layer.weight.double().permute(0, 4, 1, 2, 3), layer.bias.double()
    dense = torch.nn.functional.conv3d(x.dense().double(), kernel, bias, padding=1, groups=groups)
    close(layer(x).feats, at_voxels(dense, x))
    with pytest.raises(ValueError, match="groups"):
        fnn.SubMConv3d(6, 12, groups=4)


@pytest.mark.parametrize(
    "ours, theirs, arguments",
    [
        (fnn.BatchNorm, torch.nn.BatchNorm1d, (5,)),
        (fnn.SyncBatchNorm, torch.nn.BatchNorm1d, (5,)),
        (fnn.LayerNorm, torch.nn.LayerNorm, (5,)),
        (fnn.Linear, torch.nn.Linear, (5, 3)),
        (fnn.Dropout, torch.nn.Dropout, (0.5,)),
        (fnn.ReLU, torch.nn.ReLU, ()),
        (fnn.LeakyReLU, torch.nn.LeakyReLU, (0.3,)),
        (fnn.SiLU, torch.nn.SiLU, ()),
        (fnn.GELU, torch.nn.GELU, ("tanh",)),
    ],
)
def test_modules_of_one_voxel_are_torch_s_on_sparse_and_plain_tensors(device, ours, theirs, arguments):
    x, layer = sparse(device=device), ours(*arguments).to(device)
    expected = theirs(*arguments).to(device)
    expected.load_state_dict(layer.state_dict())
    outputs = []
    for module, given in ((expected, x.feats), (layer, x.feats), (layer, x)):
        torch.manual_seed(1)
        outputs.append(module(given))
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2].feats, outputs[0]) and outputs[2].sites is x.sites


def test_initial_weights_are_those_of_torch():
    torch.manual_seed(0)
    ours, theirs = fnn.SubMConv3d(16, 32, 3), torch.nn.Conv3d(16, 32, 3)
    grouped = fnn.SubMConv3d(16, 64, 3, groups=8), torch.nn.Conv3d(16, 64, 3, groups=8)
    experts, linear = fnn.GroupedLinear(4, 256, 64), torch.nn.Linear(256, 64)
    pairs = (ours.weight, theirs.weight), (ours.bias, theirs.bias), [layer.weight for layer in grouped]
    for a, b in (*pairs, (experts.weight, linear.weight), (experts.bias, linear.bias)):
        assert abs(a.abs().max() / b.abs().max() - 1) < 0.1


class Network(torch.nn.Module):
    """A residual block and a head."""

    def __init__(self, channels=8):
        super().__init__()
        self.stem = fnn.SubMConv3d(5, channels)
        self.block = torch.nn.Sequential(
            fnn.BatchNorm(channels),
            fnn.ReLU(),
            fnn.SubMConv3d(channels, channels, 3, bias=False),
            fnn.LayerNorm(channels),
            fnn.GELU(),
            fnn.SubMConv3d(channels, channels, (3, 1, 3)),
        )
        self.head = torch.nn.Sequential(fnn.Linear(channels, 4), fnn.Features(torch.nn.Softplus()), fnn.Dropout(0.0))

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.block(x)).feats


def test_a_network_trains(device):
    torch.manual_seed(0)
    x, network = sparse(device=device), Network().to(device)
    target = torch.rand(len(x), 4, device=device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (network(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    again = Network().to(device)
    again.load_state_dict(network.state_dict())
    assert torch.equal(again.eval()(x), network.eval()(x))
    assert torch.equal(copy.deepcopy(network)(x), network(x))


def test_a_network_compiles_whole(device):
    torch.compiler.reset()
    torch.manual_seed(0)
    network = Network().to(device).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(network, fullgraph=True, backend=counter)
    for n in (40, 60, 90):
        x = sparse(n, device=device)
        x = fnn.SparseTensor(x.feats, x.coords, (2, 16, 16, 16))
        torch.testing.assert_close(compiled(x), network(x))
        torch.testing.assert_close(compiled(x), network(x))  # its maps are there now
    assert counter.frame_count <= 4


# ---- strided layers ----


def by_torch_strided(x, out, conv, weight, bias, *how):
    """torch's convolution of the dense grid, at the voxels of `out`; weight (Co, Kw, Kh, Kd, Ci)."""
    transposed = conv is torch.nn.functional.conv_transpose3d
    kernel = weight.double().permute(*((4, 0) if transposed else (0, 4)), 1, 2, 3)
    return at_voxels(conv(x.dense().double(), kernel, bias.double(), *how), out)


@pytest.mark.parametrize("kernel_size, stride, padding", [(2, 2, 0), (3, 2, 1), ((3, 1, 2), (2, 1, 2), (1, 0, 0))])
def test_strided_convolution_and_back(device, kernel_size, stride, padding):
    x = sparse(device=device)
    down = fnn.SparseConv3d(5, 7, kernel_size, stride, padding, precision="ieee", device=device)
    up = fnn.SparseInverseConv3d(7, 4, kernel_size, precision="ieee", device=device)
    y = down(x)
    close(y.feats, by_torch_strided(x, y, torch.nn.functional.conv3d, down.weight, down.bias, stride, padding))
    assert down(x).sites.maps is y.sites.maps, "its map is kept"
    assert torch.equal((down(x) + y).feats, 2 * y.feats)
    back = up(y)
    assert back.sites is x.sites
    (back + up(y)).feats.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (*down.parameters(), *up.parameters()))
    with pytest.raises(ValueError, match="strided layer"):
        up(x.replace(torch.randn(len(x), 7, device=device)))
    with pytest.raises(ValueError, match="kernel_size"):
        fnn.SparseInverseConv3d(7, 4, 5, device=device)(y)


def test_transposed_convolution(device):
    x = sparse(device=device)
    layer = fnn.SparseConvTranspose3d(5, 7, 3, 2, 1, output_padding=1, precision="ieee", device=device)
    y = layer(x)
    how = torch.nn.functional.conv_transpose3d, layer.weight, layer.bias, 2, 1, 1
    close(y.feats, by_torch_strided(x, y, *how))
    assert y.shape[1:] == tuple(2 * size for size in x.shape[1:])


def test_layers_that_differ_in_one_number_have_maps_of_their_own(device):
    """On the same voxels, whichever came first."""
    how = {"kernel_size": 3, "stride": 2, "padding": 1}
    variants = [{}, {"kernel_size": 2}, {"stride": 1}, {"padding": 0}, {"dilation": 2}]
    layers = [fnn.SparseConv3d(5, 7, **(how | changed), device=device) for changed in variants]
    variants.append({"output_padding": 1})
    layers += [fnn.SparseConvTranspose3d(5, 7, **(how | changed), device=device) for changed in variants]
    x = sparse(device=device)
    for layer in layers:
        y, alone = layer(x), layer(sparse(device=device))
        assert y.shape == alone.shape, layer
        assert torch.equal(y.coords, alone.coords) and torch.equal(y.feats, alone.feats), layer


@pytest.mark.parametrize("kind", [fnn.SparseConv3d, fnn.SparseConvTranspose3d])
def test_convolution_onto_given_voxels(device, kind):
    x = sparse(device=device)
    options = {"output_padding": 1} if kind is fnn.SparseConvTranspose3d else {}
    layer = kind(5, 7, 3, 2, 1, precision="ieee", device=device, **options)
    reached = layer(x)
    full = reached.dense()
    skip = sparse(60, 7, device=device)
    skip = fnn.SparseTensor(skip.feats, skip.coords % torch.tensor(reached.shape, device=device).int(), reached.shape)
    unique = torch.unique(skip.coords, dim=0).flip(0)  # in an order of its own
    skip = fnn.SparseTensor(torch.zeros(len(unique), 7, device=device), unique, reached.shape)
    y = layer(x, onto=skip)
    assert y.sites is skip.sites and (y + skip).sites is y.sites
    inside = torch.zeros_like(full[:, 0], dtype=torch.bool)
    inside[reached.coords.long().unbind(1)] = True
    expected = torch.where(inside[:, None], full, layer.bias.detach()[:, None, None, None])
    close(y.feats, at_voxels(expected, y))
    assert layer(x, onto=skip).sites is skip.sites and len(x.sites.maps) == 2, "the map is built once"
    y.feats.square().sum().backward()
    assert torch.isfinite(layer.weight.grad).all() and layer.weight.grad.any()
    with pytest.raises(ValueError, match="onto"):
        layer(x, onto=sparse(device=device))


@pytest.mark.parametrize("mode", ["max", "mean", "sum"])
def test_pooling_and_back(device, mode):
    x = sparse(device=device)
    x = fnn.SparseTensor(x.feats, x.coords, (2, 16, 16, 16))
    y = fnn.SparsePool3d(2, mode=mode)(x)
    cells = {tuple(c): row for row, c in enumerate(y.coords.tolist())}
    rows = torch.tensor([cells[b, i // 2, j // 2, k // 2] for b, i, j, k in x.coords.tolist()], device=device)
    reduce = {"max": "amax", "mean": "mean", "sum": "sum"}[mode]
    expected = torch.zeros_like(y.feats).index_reduce_(0, rows, x.feats, reduce, include_self=False) if mode != "sum" \
        else torch.zeros_like(y.feats).index_add_(0, rows, x.feats)  # fmt: skip
    close(y.feats, expected)
    back = fnn.SparseUpsample3d()(y)
    assert back.sites is x.sites
    assert torch.equal(back.feats, y.feats[rows])
    pooled = fnn.GlobalPool(mode)(x)
    parts = [part.feats for part in x.split()]
    summary = {"max": lambda t: t.amax(0), "mean": lambda t: t.mean(0), "sum": lambda t: t.sum(0)}[mode]
    close(pooled, torch.stack([summary(part) for part in parts]))


def test_pooling_of_cells_that_overlap_is_torch_s(device):
    x = sparse(device=device)
    y = fnn.SparsePool3d(3, 2, (1, 0, 1))(x)
    missing = torch.zeros_like(x.dense()[:, :1], dtype=torch.bool)
    missing[x.coords.long().unbind(1)[0], 0, *x.coords.long().unbind(1)[1:]] = True
    dense = torch.where(missing, x.dense(), -torch.inf)
    assert torch.equal(y.feats, at_voxels(torch.nn.functional.max_pool3d(dense, 3, 2, (1, 0, 1)), y))


class UNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mid, self.head = fnn.SubMConv3d(5, 8), fnn.SubMConv3d(8, 8), fnn.SubMConv3d(8, 2)
        self.down, self.up, self.pool = fnn.SparseConv3d(8, 8, 2, 2), fnn.SparseInverseConv3d(8, 8, 2), fnn.GlobalPool()

    def forward(self, x):
        x = self.stem(x)
        x = x + self.up(self.mid(self.down(x)))
        return self.pool(self.head(x))


def test_a_u_net_compiles_whole_once_its_maps_are_there(device):
    torch.compiler.reset()
    torch.manual_seed(0)
    network = UNet().to(device)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    for n in (60, 90):
        x = sparse(n, device=device)
        expected = network(x)
        torch.testing.assert_close(compiled(x), expected)
        gradients = (torch.autograd.grad(y.square().sum(), network.stem.weight) for y in (compiled(x), network(x)))
        torch.testing.assert_close(*gradients)


def test_a_u_net_compiles_in_parts_otherwise(device):
    torch.compiler.reset()
    network, x = UNet().to(device), sparse(device=device)
    again = fnn.SparseTensor(x.feats, x.coords, x.shape)
    torch.testing.assert_close(torch.compile(network, backend="aot_eager")(again), network(x))
