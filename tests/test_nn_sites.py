"""flexgemm.torch.nn: what tensors on the same voxels share, how long it lasts, and what may be done with it later."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import weakref
from functools import partial

import numpy as np
import pytest
import scenes

torch = pytest.importorskip("torch", reason="torch not installed")
from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flexgemm.torch.flops  # noqa: E402, F401
import flexgemm.torch.nn as fnn  # noqa: E402


def sparse(n=80, channels=5, device="cpu"):
    coords, _ = scenes.scene(n, batch=2)
    torch.manual_seed(0)
    return fnn.SparseTensor(torch.randn(n, channels, device=device), torch.from_numpy(coords).to(device), (2, 8, 8, 8))


# ---- arithmetic ----


def test_numbers_and_tensors_stand_on_either_side(device):
    x, row = sparse(device=device), torch.rand(5, device=device)
    for other in (1, row):
        assert torch.equal((other - x).feats, other - x.feats)
        assert torch.equal((other / x).feats, other / x.feats)
        assert torch.equal((other + x).feats, other + x.feats)
        assert torch.equal((other * x).feats, other * x.feats)


def test_arrays_of_numpy_leave_operators_to_the_tensor():
    x, row = sparse(), np.ones(5, np.float32)
    for other in (row, row[0]):
        assert torch.equal((other * x).feats, x.feats)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
def test_operators_with_a_tensor_compile(device, name):
    x, scale = sparse(device=device), (torch.rand(1, 5, device=device) + 1).requires_grad_()
    x.feats.requires_grad_()
    apply = getattr(operator, name)
    for function in (apply, lambda x, scale: apply(scale, x)):
        compiled = torch.compile(lambda *args, f=function: f(*args).feats, fullgraph=True, backend="aot_eager")
        out, expected = compiled(x, scale), function(x.feats, scale)
        torch.testing.assert_close(out, expected)
        gradients = (torch.autograd.grad(y.square().sum(), (x.feats, scale)) for y in (out, expected))
        torch.testing.assert_close(*gradients)


def test_what_is_no_operator_takes_no_sparse_tensor(device):
    x = sparse(device=device)
    for wrong in (lambda: torch.relu(x), lambda: torch.add(x.feats, x, alpha=2), lambda: torch.cat([x.feats, x])):
        with pytest.raises(TypeError):
            wrong()


@pytest.mark.parametrize("shape", [(7, 5), (80,)], ids=str)
def test_features_of_other_voxels_are_refused(shape):
    x = sparse()
    with pytest.raises(ValueError, match=r"^feats: expected \(80, C\) to match the voxels, got"):
        x.replace(torch.zeros(shape))


def test_a_tensor_is_made_of_sites_or_of_coordinates():
    x = sparse()
    y = fnn.SparseTensor(2 * x.feats, sites=x.sites)
    assert torch.equal((x + y).feats, 3 * x.feats)
    with pytest.raises(ValueError, match="^sites: expected them instead"):
        fnn.SparseTensor(x.feats, x.coords, x.shape, sites=x.sites)
    with pytest.raises(ValueError, match="^shape: expected"):
        fnn.SparseTensor(x.feats, x.coords)
    with pytest.raises(TypeError, match="^coords: expected a torch.Tensor"):
        fnn.SparseTensor(x.feats)


# ---- batches of a DataLoader ----


def batches(**options):
    """Of two samples each, made in a process of its own."""
    samples = sparse().split() * 2
    loader = torch.utils.data.DataLoader(samples, 2, collate_fn=fnn.SparseTensor.collate, num_workers=1, **options)
    return list(loader)


def test_workers_give_whole_batches():
    x, layer = sparse(), fnn.SubMConv3d(5, 7, 3)
    for y in batches():
        assert y.shape == x.shape
        assert torch.equal(layer(y).dense(), layer(x).dense())


def test_pinned_memory_has_features_and_coordinates(monkeypatch):
    """Of a copy. Whether torch pins it takes a GPU to tell."""
    x, pinned = sparse(), []

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    y = x.pin_memory()
    feats, coords = pinned
    assert y.feats is feats and y.coords is coords
    assert y.shape == x.shape and torch.equal(y.dense(), x.dense())


def test_pinned_memory_of_a_gpu(cuda_device):
    x = sparse()
    y = x.pin_memory()
    assert y.feats.is_pinned() and y.coords.is_pinned() and not x.feats.is_pinned()
    z = y.to(cuda_device, non_blocking=True)
    assert z.coords.is_cuda and torch.equal(z.dense().cpu(), x.dense())


def test_batches_in_pinned_memory(cuda_device):
    x = sparse()
    for y in batches(pin_memory=True):
        assert y.feats.is_pinned() and y.coords.is_pinned() and y.shape == x.shape
        z = y.to(cuda_device, non_blocking=True)
        assert z.coords.is_cuda and torch.equal(z.dense().cpu(), x.dense())


# ---- how long it lasts ----


def down_and_up(x, layers):
    down, deeper, up = layers
    y = down(x)
    return x + up(y + up(deeper(y)))


def onto_each_other(x, layers):
    down, deeper, _ = layers
    y = down(x)
    z = fnn.SparseConvTranspose3d(5, 5, 2, 2, device=x.device)(y, onto=x)
    return x + z + fnn.SparseConvTranspose3d(5, 5, 2, 2, device=x.device)(down(x, onto=deeper(x)), onto=x)


@pytest.mark.parametrize("network", [down_and_up, onto_each_other])
def test_a_batch_leaves_with_its_last_tensor(device, network):
    """Without Python's search for cycles, which comes late, and counts objects rather than a GPU's memory."""
    layers = fnn.SparseConv3d(5, 5, 2, 2), fnn.SparsePool3d(2), fnn.SparseInverseConv3d(5, 5, 2)
    layers = [layer.to(device) for layer in layers]
    x = sparse(device=device)
    network(x, layers).feats.sum().backward()
    gc.collect()
    gc.disable()
    try:
        y = network(x, layers)
        kept = [weakref.ref(x.coords), weakref.ref(x.sites), *(weakref.ref(nmap) for nmap, _ in x.sites.maps.values())]
        assert len(kept) > 2
        del x
        assert kept[0]() is not None, "the output is on these voxels"
        del y
        assert not any(ref() is not None for ref in kept)
    finally:
        gc.enable()


def test_maps_of_deeper_voxels_are_kept_for_the_next_pass(device):
    x, layer = sparse(device=device), fnn.SubMConv3d(5, 5).to(device)
    down = fnn.SparsePool3d(2)
    nmaps = []
    for _ in range(2):
        y = down(x)
        layer(y)
        nmaps.append(y.sites.neighbor_map((3, 3, 3), (1, 1, 1)))
    assert nmaps[0] is nmaps[1]


# ---- what the first pass leaves for a later one ----


def network_of(device):
    """Mirrored and even, strided, pooled: every kind of map."""
    torch.manual_seed(1)
    layers = fnn.SubMConv3d(5, 5), fnn.SubMConv3d(5, 5, 2), fnn.SparseConv3d(5, 5, 2, 2), fnn.SparsePool3d(3, 2, 1)
    return torch.nn.Sequential(*layers).to(device)


def gradients(function, network, x):
    loss = function(x).feats.square().sum()
    return torch.autograd.grad(loss, list(network.parameters()))


FIRST = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_goes_on_from_a_pass_without_gradients(device, fresh_compiler, compiled, first):
    network = network_of(device)
    function = torch.compile(network, fullgraph=True, backend="aot_eager") if compiled else network
    for n in (60, 90):
        x = sparse(n, device=device)
        with FIRST[first]():
            network(x)
        expected = gradients(network, network, sparse(n, device=device))
        for _ in range(2):  # the second time with what the first has built
            torch.testing.assert_close(gradients(function, network, x), expected)


def test_training_goes_on_from_an_inference_that_modes_look_at(device):
    layer, x = fnn.SubMConv3d(5, 5, 2).to(device), sparse(device=device)
    with torch.inference_mode(), FlopCounterMode(display=False):
        layer(x)
    x.feats.requires_grad_()
    with FlopCounterMode(display=False):
        layer(x).feats.sum().backward()
    assert x.feats.grad.any()


class Captured(torch.nn.Module):
    """A network over voxels that it holds."""

    def __init__(self, device):
        super().__init__()
        self.x = sparse(device=device)
        self.layers = torch.nn.Sequential(fnn.SubMConv3d(5, 5), fnn.SubMConv3d(5, 5, 2)).to(device)

    def forward(self, feats):
        return self.layers(self.x.replace(feats)).feats


def export(module, feats):
    torch.export.export(module, (feats,), strict=False)


def trace(module, feats):
    make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(feats)


def fake(module, feats):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(feats))


@pytest.mark.parametrize("built", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("look", [export, trace, fake])
def test_a_trace_leaves_nothing_fake_behind(device, look, built):
    module = Captured(device)
    feats = module.x.feats.clone().requires_grad_()
    if built:  # but not what the gradient of the even kernel needs
        with torch.no_grad():
            module(feats)
    look(module, feats)
    out = module(feats)
    expected = Captured(device)
    expected.load_state_dict(module.state_dict())
    torch.testing.assert_close(out, expected(feats))
    torch.testing.assert_close(*(torch.autograd.grad(m(feats).sum(), feats) for m in (module, expected)))


class Stem(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = fnn.SubMConv3d(5, 7, 3)

    def forward(self, feats, coords):
        return self.conv(fnn.SparseTensor(feats, coords, (2, 8, 8, 8)))


def test_selective_checkpointing(device):
    """A block runs anew by the same operators, also where it builds a map for the first time, and then another one."""
    whole = sparse(channels=4, device=device)
    feats, coords, shape = whole.feats, whole.coords, whole.shape
    layers = [fnn.SubMConv3d(4, 4, device=device) for _ in range(2)]
    saved = torch.ops.flexgemm.neighbor_map.default, torch.ops.flexgemm.sparse_conv3d.default

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(feats, x):
        y = layers[0](x.replace(feats)).feats.sigmoid()
        kept = slice(10, None)
        return layers[1](fnn.SparseTensor(y[kept], x.coords[kept].contiguous(), x.shape)).feats.sigmoid()

    results = []
    for checkpointed in (False, True):
        leaf, x = feats.clone().requires_grad_(), fnn.SparseTensor(feats, coords, shape)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(block, leaf, x, use_reentrant=False, context_fn=contexts) if checkpointed else block(leaf, x)
        results.append(torch.autograd.grad(out.square().sum(), (leaf, layers[0].weight, layers[1].weight)))
    torch.testing.assert_close(*results)


def test_exported_programs_give_no_sparse_tensors():
    """Their coordinates would be those of the trace."""
    x = sparse()
    with pytest.raises(Exception, match="into and out of a traced program"):
        torch.export.export(Stem(), (x.feats, x.coords), strict=False)


# ---- threads ----


def test_what_two_threads_build_at_once_is_one():
    sites, firsts = sparse().sites, []

    def build():  # and another thread is done before
        firsts.append(sites.cached("key", object))
        return object()

    assert sites.cached("key", build) is firsts[0]


class AddsMaps:
    """As it is pickled another thread builds a map."""

    shared: dict[object, object]

    def __reduce__(self):
        self.shared[len(self.shared)] = None
        return AddsMaps, ()


def test_maps_may_be_built_while_a_tensor_is_copied():
    x = sparse()
    AddsMaps.shared = x.sites.maps
    x.sites.maps["first"] = AddsMaps()
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert "first" in copied.sites.maps
        assert torch.equal(copied.feats, x.feats)
    assert len(x.sites.maps) == 3
    out = sparse()
    out, again = copy.deepcopy((out, out.replace(-out.feats)))
    assert out.sites.maps is again.sites.maps


def test_flops_are_counted_on_fake_tensors():
    """The counter takes what modules give apart as a pytree."""
    x = sparse()
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        stem = Stem()
        out = stem(mode.from_tensor(x.feats), mode.from_tensor(x.coords))
    assert tuple(out.shape) == (2, 8, 8, 8)
    assert counter.get_flop_counts()["Stem.conv"]


# ---- strided maps in traces ----


class Levels(torch.nn.Module):
    """Five layers, each with a map of its own."""

    def __init__(self):
        super().__init__()
        self.same, self.down = fnn.SubMConv3d(5, 8), fnn.SparseConv3d(8, 8, 3, 2, 1)
        self.further = fnn.SparseConv3d(8, 8, 2, 2)
        self.up, self.back = fnn.SparseConvTranspose3d(8, 8, 2, 2), fnn.SparseInverseConv3d(8, 8, 3)

    def forward(self, x):
        fine = self.same(x)
        coarse = self.down(fine)
        return self.back(coarse + self.up(self.further(coarse), onto=coarse).feats) + fine


def test_compiled_networks_leave_the_program_for_maps_that_are_missing(fresh_compiler, recwarn):
    """Where nothing of how they are made is traced, nor warned of, and a new scene compiles nothing new."""
    network, counter, counts = Levels(), CompileCounter(), []
    compiled = torch.compile(network, backend=counter)
    for n in (80, 90, 100, 110):
        torch.testing.assert_close(compiled(sparse(n)).feats, network(sparse(n)).feats)
        counts.append(counter.frame_count)
    assert counts[2] == counts[3] <= 12
    assert not [warning for warning in recwarn if "trace" in str(warning.message)]


def test_coordinates_of_a_trace_have_no_strided_maps():
    with FakeTensorMode():
        x = fnn.SparseTensor(torch.randn(10, 4), torch.zeros(10, 4, dtype=torch.int32), (1, 4, 4, 4))
        with pytest.raises(TypeError, match="^coords: expected a tensor with data.*, got a FakeTensor$"):
            fnn.SparseConv3d(4, 8, 2, 2)(x)
