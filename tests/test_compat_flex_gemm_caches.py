"""What programs written against FlexGEMM do to its caches: they write into maps, give their own, keep them in files."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import verdicts

torch = pytest.importorskip("torch", reason="torch not installed")
from compat_scenes import Scene, numpy, signed  # noqa: E402

from flexgemm.compat.flex_gemm.ops.spconv import (  # noqa: E402
    SubMConv3dFunction,
    SubMConv3dNeighborCache,
    sparse_conv3d,
    sparse_submanifold_conv3d,
)
from flexgemm.compat.flex_gemm.ops.spconv.sparse_conv3d import SparseConv3dNeighborCache  # noqa: E402

WRITES = {
    "a view": lambda nmap: nmap.view(torch.int32)[:, :1].fill_(-1),
    "the map": lambda nmap: nmap.__setitem__((slice(None), 0), 0xFFFFFFFF),
}
OTHER_MAP = "^neighbor_map: expected no other map, .* build it anew"


def built(s):
    return sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias)[1]


def strided(s):
    return sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, s.coords, padding=(1, 1, 1))[2]


def kept(cache):
    """What a file gives back."""
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def of_flexgemm(kind, **items):
    """A cache as pickle makes it of what FlexGEMM kept: its attributes and nothing else."""
    cache = kind.__new__(kind)
    vars(cache).update(items)
    return cache


# ---- written into ----


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (1, 1, 1)], ids=str)
def test_a_map_that_is_written_into_counts(device, kernel_size, write):
    """From the next call on, and so does what is derived from it."""
    s = Scene(device, kernel_size=kernel_size)
    cache = built(s)
    nmap, codes = cache.nmap, cache.gray_code
    s.check(cache)
    assert cache.nmap is nmap, "reading changes nothing"
    write(cache["neighbor_map"])
    s.map[0] = -1
    s.check(cache)
    assert not torch.equal(cache.gray_code, codes)
    with pytest.raises(TypeError, match="^freeze: expected a cache of coordinates"):
        cache.freeze()
    assert (nmap.map[0] >= 0).any(), "the map's own memory stays as it was"
    cache["neighbor_map"].view(torch.int32)[:, -1] = -1
    s.map[-1] = -1
    s.check(cache)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_strided_map_that_is_written_into_is_refused(device, write):
    s = Scene(device)
    cache = strided(s)
    write(cache["neighbor_map"])
    with pytest.raises(TypeError, match=OTHER_MAP):
        sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, cache)


def test_a_map_is_read_in_inference_mode(device):
    """Whose tensors count no versions; writing is seen there too, but for views of another dtype."""
    s = Scene(device)
    with torch.inference_mode():
        for cache, convolve in ((built(s), sparse_submanifold_conv3d), (strided(s), sparse_conv3d)):
            nmap = cache.nmap
            np.testing.assert_array_equal(signed(cache["neighbor_map"]), s.map)
            out = convolve(s.feats, s.coords, s.shape, s.weight, s.bias, cache)[0]
            verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
            assert cache.nmap is nmap
        cache = built(s)
        WRITES["the map"](cache["neighbor_map"])
        out = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, cache)[0]
        s.map[0] = -1
        verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)


# ---- given ----


def test_a_map_of_some_outputs(device):
    """As many as it has rows."""
    s = Scene(device)
    s.map = np.ascontiguousarray(s.map[:, :2])
    cache = SubMConv3dNeighborCache(neighbor_map=built(s).neighbor_map[:2].contiguous())
    out = SubMConv3dFunction._sparse_submanifold_conv_forward(s.feats, cache, s.weight, s.bias)
    assert tuple(out.shape) == (2, 7)
    verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
    s.check(cache)


def test_entries_beyond_the_inputs_are_no_neighbours_on_a_gpu(device):
    """And refused on the CPU. One cache serves features of other numbers of rows."""
    s = Scene(device)
    cache = SubMConv3dNeighborCache(neighbor_map=built(s).neighbor_map)
    s.check(cache)
    s.feats = s.feats[:150].detach().requires_grad_()
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"^map: entry \(\d+, \d+\) is \d+, expected -1 or a row below 150$"):
            s.check(cache)
        return
    s.map[s.map >= 150] = -1
    s.check(cache)


def test_a_cache_whose_map_was_read_compiles_whole(device):
    s = Scene(device)
    cache = built(s)
    assert len(cache["neighbor_map"]) == len(s.feats)

    def layer(feats):
        return sparse_submanifold_conv3d(feats, s.coords, s.shape, s.weight, s.bias, cache)[0]

    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(s.feats), layer(s.feats))


def test_a_cache_gets_its_map_later(device):
    s, cache = Scene(device), SubMConv3dNeighborCache()
    assert not hasattr(cache, "neighbor_map")
    with pytest.raises(TypeError, match="^neighbor_cache: expected one with a neighbor_map, got one without$"):
        sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, cache)
    with pytest.raises(TypeError, match="^freeze: expected a cache of coordinates"):
        cache.freeze()
    cache["neighbor_map"] = built(s).neighbor_map
    s.check(cache)


@pytest.mark.parametrize("items", [{}, {"neighbor_map": None}, {"neighbor_map": None, "neighbor_map_bwd": None}])
def test_a_strided_cache_is_made_of_no_given_map(items):
    with pytest.raises(TypeError, match=OTHER_MAP):
        SparseConv3dNeighborCache(**items)


# ---- kept ----


@pytest.mark.parametrize("keep", [kept, copy.deepcopy, copy.copy])
def test_copies(device, keep):
    """Of caches whose map was read, written into and given."""
    s = Scene(device)
    cache = built(s)
    for _ in range(2):
        np.testing.assert_array_equal(signed(cache["neighbor_map"]), s.map)
        again = keep(cache)
        np.testing.assert_array_equal(signed(again["neighbor_map"]), s.map)
        assert again.freeze().nmap is again.nmap
        cache = again
    other = strided(s)
    np.testing.assert_array_equal(signed(other["neighbor_map"]), s.map)
    out = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, keep(other))[0]
    verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
    cache["neighbor_map"].view(torch.int32)[:, 0] = -1
    s.map[0] = -1
    s.check(keep(cache))
    s.check(cache)
    cache["neighbor_map"].view(torch.int32)[:, 1] = -1
    s.map[1] = -1
    s.check(keep(cache))


def test_a_cache_that_flexgemm_kept(device):
    """Of the submanifold convolution alone."""
    s = Scene(device)
    cache = built(s)
    items = {name: cache[name] for name in ("neighbor_map", "gray_code", "sorted_idx", "valid_signal_i")}
    items["neighbor_map"].view(torch.int32)[:, 0] = -1
    s.map[0] = -1
    s.check(kept(of_flexgemm(SubMConv3dNeighborCache, **items)))
    other = kept(of_flexgemm(SparseConv3dNeighborCache, neighbor_map_bwd=None, **items))
    assert torch.equal(other["neighbor_map"], items["neighbor_map"])
    with pytest.raises(TypeError, match=OTHER_MAP):
        sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, other)
