"""Neighbour maps as objects: copied, saved, moved."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import scenes
from scenes import leaves, voxels

import flexgemm
from flexgemm import _C

torch = pytest.importorskip("torch", reason="torch not installed")
from test_torch_compile import Seen, conv  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flexgemm.torch as ft  # noqa: E402
from flexgemm.torch.maps import from_operators  # noqa: E402
from flexgemm.torch.nn import SparseTensor  # noqa: E402
from flexgemm.torch.ops import maps_of  # noqa: E402

NUMBERS = (
    *("shape", "out_shape", "kernel_size", "stride", "padding"),
    *("dilation", "transposed", "submanifold", "phases"),
)


def copies_of(nmap):
    buffer = io.BytesIO()
    torch.save(nmap, buffer)
    buffer.seek(0)
    tensors, spec = pytree.tree_flatten(nmap)
    return [
        copy.deepcopy(nmap),
        copy.copy(nmap),
        pickle.loads(pickle.dumps(nmap)),
        torch.load(buffer, weights_only=True),
        pytree.tree_unflatten(tensors, spec),
        pytree.tree_unflatten(tensors, pytree.treespec_loads(pytree.treespec_dumps(spec))),
    ]


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 3, 2), (2, 3, 3), (3, 2, 3), (3, 3, 2)], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["lazy", "frozen"])
def test_maps_are_copied_and_saved(device, kernel_size, frozen):
    coords, shape = voxels(50, device)
    nmap = ft.neighbor_map(coords, shape, kernel_size)
    if frozen:
        assert nmap.freeze() is nmap
    for other in copies_of(nmap):
        assert repr(other) == repr(nmap)
        assert other.mirrored == nmap.mirrored == all(size % 2 for size in kernel_size)
        assert torch.equal(other.map, nmap.map)
        assert torch.equal(other.transposed_map, nmap.transposed_map)
        inputs = leaves(50, device, kernel_size=kernel_size)
        torch.testing.assert_close(conv(*inputs, other), conv(*inputs, nmap))


@pytest.mark.parametrize("transposed", [False, True], ids=["strided", "transposed"])
def test_maps_of_strided_layers_are_copied_and_saved(device, transposed):
    coords, shape = voxels(50, device)
    nmap = flexgemm.sparse_conv_map(coords, shape, (3, 2, 1), (2, 1, 3), (1, 0, 0), (1, 2, 1), transposed=transposed)
    assert nmap.out_shape != nmap.shape
    for other in copies_of(nmap):
        for each, same in ((other, nmap), (other.inverse, nmap.inverse)):
            assert repr(each) == repr(same)
            for name in NUMBERS:
                assert getattr(each, name) == getattr(same, name), name
            assert torch.equal(each.coords, same.coords) and torch.equal(each.out_coords, same.out_coords)
            assert torch.equal(each.map, same.map)


@pytest.mark.parametrize("kernel_size", [(1, 1, 7), (1, 1, 4)])
def test_copies_of_a_frozen_map_have_its_orders(device, kernel_size):
    """On Hopper with the map's entries behind them, which is nothing that anybody sees."""
    coords, shape = scenes.scene(600)
    nmap, plain = (ft.neighbor_map(torch.from_numpy(coords).to(device), shape, kernel_size) for _ in range(2))
    order, inverse_order = plain.native_order, plain.inverse.order
    nmap.freeze()
    inputs = leaves(600, device, kernel_size=kernel_size)
    out = conv(*inputs, plain)
    for other in (nmap, *copies_of(nmap)):
        assert other.order_groups == plain.order_groups
        for got, expected in ((other.order, order), (other.inverse.order, inverse_order)):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)
        torch.testing.assert_close(conv(*inputs, other), out)
        if device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0):
            rows = 1 + nmap.kernel_volume
            assert [array.shape[0] for array in (other.native_order, other.native_gradient()[1])] == [rows, rows]


def test_pytrees_and_operators_take_segments_along(device):
    coords, shape = scenes.scene(5000)
    nmap = ft.neighbor_map(torch.from_numpy(coords).to(device), shape).freeze()
    segments = nmap.segments()
    assert (segments is not None) == (device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0))
    tensors, spec = pytree.tree_flatten(nmap)
    other = pytree.tree_unflatten(tensors, spec)
    assert other.segments() is segments
    assert maps_of(other, True)[-1] is segments
    assert copy.deepcopy(nmap).map.equal(nmap.map)


def test_coordinates_of_a_pytree_need_not_be_contiguous(device):
    """As those of nonzero() are not."""
    grid = torch.rand(2, 6, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    coords = grid.nonzero().int().to(device).t().contiguous().t()
    weight, feats = torch.randn(8, 2, 2, 2, 4, device=device), torch.randn(len(coords), 4, device=device)

    def loss(feats, nmap):
        return ft.sparse_conv3d(feats, weight, neighbor_map=nmap, precision="ieee").square().sum()

    results = []
    for given in (coords, coords.contiguous()):
        nmap = flexgemm.sparse_conv_map(given, grid.shape, 2, 2)
        same = pytree.tree_map(lambda leaf: leaf, nmap)
        results.append((torch.func.grad(loss)(feats, nmap), same.transposed_map, same.inverse.map))
    assert all(map(torch.equal, *results))


def test_maps_move(device):
    coords, shape = voxels(50)
    nmap = flexgemm.neighbor_map(coords, shape, (3, 3, 3))
    moved = nmap.to(device)
    assert (moved is nmap) == (device.type == "cpu")
    assert moved.map.device.type == moved.coords.device.type == device.type
    assert torch.equal(moved.map.cpu(), nmap.map)
    assert moved.to(device) is moved
    neutral = flexgemm.neighbor_map(coords.numpy(), shape, (3, 3, 3))
    assert neutral.to("cpu") is neutral
    with pytest.raises(ValueError, match="device"):
        neutral.to("tpu")


def test_a_map_that_a_trace_makes_says_what_it_is(device):
    coords, shape = voxels(50, device)
    plain = ft.neighbor_map(coords, shape, (3, 2, 5), (1, 2, 3))
    with FlopCounterMode(display=False):
        traced = ft.neighbor_map(coords, shape, (3, 2, 5), (1, 2, 3))
    for name in NUMBERS:
        assert getattr(traced, name) == getattr(plain, name), name
    assert torch.equal(traced.map, plain.map) and torch.equal(traced.inverse.map, plain.inverse.map)


@pytest.mark.parametrize("transposed", [False, True], ids=["strided", "transposed"])
@pytest.mark.parametrize("kernel_size, stride, padding", [(2, 2, 0), (3, 2, 1), ((3, 1, 2), (2, 1, 2), (1, 0, 0))])
def test_a_trace_turns_maps_of_strided_layers(device, kernel_size, stride, padding, transposed):
    coords, shape = voxels(50, device)
    how = coords, shape, kernel_size, stride, padding
    nmap, expected = (flexgemm.sparse_conv_map(*how, transposed=transposed) for _ in range(2))
    assert torch.equal(maps_of(nmap, True)[2], expected.native_gradient()[0])
    assert nmap.native_gradient()[0] is maps_of(nmap, True)[2], "once"


def test_operators_are_told_the_phases_of_both_maps(device):
    """Of the map, then of its gradient's, forward and backward."""

    def told(function, args):
        return list(args[[argument.name for argument in function._schema.arguments].index("phases")])

    coords, shape = voxels(50, device)
    nmap = flexgemm.sparse_conv_map(coords, shape, 3, (2, 1, 4), 1)
    for each, phases in ((nmap, [1, 1, 1, 2, 1, 3]), (nmap.inverse, [2, 1, 3, 1, 1, 1])):
        inputs = leaves(each.num_voxels, device)
        with Seen() as seen:
            ft.sparse_conv3d(*inputs, neighbor_map=each).sum().backward()
        assert [told(*call) for call in seen.calls if "sparse_conv3d" in str(call[0])] == [phases, phases]
        operators_map = from_operators(each.native, None, None, None, (3, 3, 3), phases, each.num_voxels)
        assert operators_map.phases == each.phases


def test_traced_calls_go_by_segments_that_are_still_in_the_building(cuda, monkeypatch):
    """As others do, so that results do not depend on how far the GPU is."""
    coords, shape = scenes.scene(5000)
    nmap = flexgemm.neighbor_map(torch.from_numpy(coords).to("cuda"), shape)
    monkeypatch.setattr(_C, "passed", lambda mark: False)
    built = nmap.segments()
    if built is None:
        pytest.skip("only Hopper has segments")
    assert maps_of(nmap, True)[4] is pytree.tree_flatten(nmap)[0][-1] is built


@pytest.mark.parametrize("transposed", [False, True], ids=["strided", "transposed"])
def test_a_trace_orders_the_rows_of_turned_maps_alike(device, transposed):
    """In one order for all offsets, by keys as long: those of the finer grid have phases."""
    coords, shape = scenes.scene(2500)
    how = torch.from_numpy(coords).to(device), shape, 3, 2, 1
    nmap, expected = (flexgemm.sparse_conv_map(*how, transposed=transposed) for _ in range(2))
    order, plain = maps_of(nmap, True)[3], expected.native_gradient()[1]
    assert (plain is None) == (device.type == "cpu")
    if plain is None:
        assert order is None
    else:
        assert torch.equal(order, plain[:1])


def test_maps_made_in_inference_mode_are_trained_on(device):
    """Frozen too, and with what that adds on Hopper."""
    coords, shape = scenes.scene(600)
    coords = torch.from_numpy(coords).to(device)
    feats = torch.randn(600, 8, device=device, requires_grad=True)

    def maps():
        even, strided = flexgemm.neighbor_map(coords, shape, (1, 1, 4)), flexgemm.sparse_conv_map(coords, shape, 2, 2)
        return even, even.freeze(), strided.freeze(), strided.inverse, ft.neighbor_map(coords, shape, 2).inverse

    with torch.inference_mode():
        made = maps()
    for nmap, expected in zip(made, maps(), strict=True):
        assert not any(tensor.is_inference() for tensor in pytree.tree_leaves(nmap) if tensor is not None)
        rows, weight = feats[: nmap.num_voxels], torch.randn(5, *nmap.kernel_size, 8, device=device)
        results = []
        for each in (nmap, expected):
            with FlopCounterMode(display=False):  # where a map is an operator's tensors
                out = ft.sparse_conv3d(rows, weight, neighbor_map=each)
                results.append(torch.autograd.grad(out.square().sum(), feats))
        torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of sizes that it takes for constants
def test_torch_jit_trace(device):
    """What is traced is the operation, not its memory: other numbers, and other numbers of voxels, give others."""
    torch.manual_seed(0)
    coords, shape = voxels(50, device)
    weight, kernel = torch.randn(6, 4, device=device), torch.randn(8, 3, 3, 3, 4, device=device)

    def convolve(feats, coords):
        return ft.submanifold_conv3d(feats, kernel, neighbor_map=ft.neighbor_map(coords, shape))

    functions = [
        convolve,
        lambda feats, coords: ft.gemm_nt(feats, weight),
        lambda feats, coords: ft.quantize(feats, granularity="row")[1],
        lambda feats, coords: ft.encode_seq(coords, shape).clone(),
        lambda feats, coords: ft.global_pool(feats, coords, 2),
        lambda feats, coords: SparseTensor.collate([SparseTensor(feats, coords, shape)] * 2).dense(),
    ]
    other = torch.randn(30, 4, device=device), voxels(30, device)[0]
    for function in functions:
        traced = torch.jit.trace(function, (torch.randn(50, 4, device=device), coords))
        torch.testing.assert_close(traced(*other), function(*other))
