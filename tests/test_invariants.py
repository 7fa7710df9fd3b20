"""What must hold whatever the numbers are: hypothesis looks for scenes that break it."""

from __future__ import annotations

import guarded
import numpy as np
import reference
import scenes
import verdicts
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import f64
from verdicts import assert_gemm_rows, assert_rows, assert_same_bits

import flexgemm

kernels = st.tuples(*[st.integers(1, 4)] * 3)
odd_kernels = st.tuples(*[st.sampled_from([1, 3, 5])] * 3)
dilations = st.tuples(*[st.integers(1, 3)] * 3)
channels = st.integers(1, 40)
modes = st.sampled_from(["float32", "float16", "bfloat16"])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def voxels(draw, min_size=0):
    """(coords, shape): any subset of a small grid, in any order."""
    shape = draw(st.tuples(st.integers(1, 3), *[st.integers(1, 6)] * 3))
    n = draw(st.integers(min(min_size, int(np.prod(shape))), int(np.prod(shape))))
    flat = np.random.default_rng(draw(seeds)).permutation(int(np.prod(shape)))[:n]
    return np.stack(np.unravel_index(flat, shape), axis=1).astype(np.int32), shape


def problem(seed, n, ci, co, kernel_size, dtype):
    rng = np.random.default_rng(seed)
    shapes = (n, ci), (co, *kernel_size, ci), (co,), (n, co)
    return [scenes.values(rng, s, dtype, one_sign=min(ci, co) < 32) for s in shapes]


@given(voxels(), kernels, dilations)
def test_any_map_is_the_dictionary_s(backend, scene, kernel_size, dilation):
    coords, shape = scene
    for transposed in (False, True):
        nmap = guarded.neighbor_map(backend, coords, shape, kernel_size, dilation, transposed=transposed)
        expected = reference.neighbor_map(coords, shape, kernel_size, dilation, transposed)
        np.testing.assert_array_equal(nmap, expected)


@given(voxels(), kernels, dilations)
def test_a_map_and_its_transposed_agree(backend, scene, kernel_size, dilation):
    """map[v, n] = m exactly where transposed[v, m] = n."""
    coords, shape = scene
    pairs = []
    for transposed in (False, True):
        nmap = guarded.neighbor_map(backend, coords, shape, kernel_size, dilation, transposed=transposed)
        v, here = np.nonzero(nmap >= 0)
        there = nmap[v, here]
        pairs.append(set(zip(v, there, here, strict=True) if transposed else zip(v, here, there, strict=True)))
    assert pairs[0] == pairs[1]


@given(voxels(), odd_kernels, dilations)
def test_an_odd_map_is_its_own_mirror(backend, scene, kernel_size, dilation):
    coords, shape = scene
    forward, backward = (
        guarded.neighbor_map(backend, coords, shape, kernel_size, dilation, transposed=t) for t in (False, True)
    )
    np.testing.assert_array_equal(backward, forward[::-1])


@given(voxels(), kernels, st.integers(0, 2**20), st.integers(1, 2**10))
def test_a_map_does_not_depend_on_where_the_scene_lies(backend, scene, kernel_size, shift, room):
    """Far from every edge of a larger grid, the same voxels have the same neighbours."""
    coords, shape = scene
    moved = coords + np.array([0, shift, shift // 2, shift // 3], np.int32)
    larger = (shape[0], *(s + shift + room for s in shape[1:]))
    near = guarded.neighbor_map(backend, coords, shape, kernel_size)
    np.testing.assert_array_equal(guarded.neighbor_map(backend, moved, larger, kernel_size), near)


@given(voxels(), kernels, dilations, channels, channels, modes, seeds)
def test_every_pass_meets_the_oracle(backend, scene, kernel_size, dilation, ci, co, dtype, seed):
    coords, shape = scene
    feats, weight, bias, grad_out = problem(seed, len(coords), ci, co, kernel_size, dtype)
    nmap, transposed = (
        reference.neighbor_map(coords, shape, kernel_size, dilation, transposed=t) for t in (False, True)
    )
    tolerance = verdicts.ROW_TOLERANCE[dtype]
    out = guarded.conv_forward(backend, feats, weight, bias, nmap)
    assert_rows(out, reference.conv_forward(feats, weight, bias, nmap), tolerance)
    grad_feats = guarded.conv_dgrad(backend, grad_out, weight, transposed)
    assert_rows(grad_feats, reference.conv_dgrad(grad_out, weight, nmap, len(coords)), tolerance, "grad_feats")
    grad_weight, grad_bias = guarded.conv_wgrad(backend, grad_out, feats, nmap)
    expected, expected_bias = reference.conv_wgrad(grad_out, feats, nmap)
    assert_rows(grad_weight.swapaxes(0, 1), expected.swapaxes(0, 1), tolerance, "grad_weight by offset")
    assert_rows(grad_bias[None], expected_bias[None], tolerance, "grad_bias")


def convolve(backend, coords, shape, feats, weight, bias=None):
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, weight.shape[1:4])
    arrays = (None if a is None else backend.array(a) for a in (feats, weight, bias))
    return backend.numpy(flexgemm.submanifold_conv3d(*arrays, neighbor_map=nmap))


@given(voxels(), kernels, channels, channels, modes, seeds)
def test_permuting_the_rows_permutes_the_output(backend, scene, kernel_size, ci, co, dtype, seed):
    coords, shape = scene
    feats, weight, bias, _ = problem(seed, len(coords), ci, co, kernel_size, dtype)
    order = np.random.default_rng(seed).permutation(len(coords))
    out = convolve(backend, coords, shape, feats, weight, bias)
    permuted = convolve(backend, coords[order], shape, feats[order], weight, bias)
    assert_rows(permuted, f64(out[order]), verdicts.ROW_TOLERANCE[dtype])


@given(voxels(), kernels, channels, channels, modes, seeds)
def test_splitting_the_batch_changes_nothing(backend, scene, kernel_size, ci, co, dtype, seed):
    coords, shape = scene
    feats, weight, bias, _ = problem(seed, len(coords), ci, co, kernel_size, dtype)
    out = convolve(backend, coords, shape, feats, weight, bias)
    for sample in range(shape[0]):
        mine = coords[:, 0] == sample
        first = coords[mine] * np.array([0, 1, 1, 1], np.int32)
        alone = convolve(backend, first, (1, *shape[1:]), feats[mine], weight, bias)
        assert_rows(alone, f64(out[mine]), verdicts.ROW_TOLERANCE[dtype])


@given(voxels(), kernels, channels, channels, seeds)
def test_convolution_is_linear(backend, scene, kernel_size, ci, co, seed):
    coords, shape = scene
    first, weight, _, _ = problem(seed, len(coords), ci, co, kernel_size, "float32")
    second, other, _, _ = problem(seed + 1, len(coords), ci, co, kernel_size, "float32")
    parts = [f64(convolve(backend, coords, shape, f, w)) for f in (first, second) for w in (weight, other)]
    whole = convolve(backend, coords, shape, first + second, weight + other)
    np.testing.assert_allclose(whole, sum(parts), rtol=0, atol=1e-5 * max(1, abs(whole).max(initial=0)))


@given(voxels(min_size=1), kernels, dilations, channels, channels, modes, seeds)
def test_gradients_are_the_adjoint(backend, scene, kernel_size, dilation, ci, co, dtype, seed):
    """<conv(x; w), g> = <x, dgrad(g)> = <w, wgrad(g, x)>, and <b, bias grad> where the bias is b."""
    coords, shape = scene
    feats, weight, bias, grad_out = problem(seed, len(coords), ci, co, kernel_size, dtype)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, kernel_size, dilation)
    x, w, b, g = map(backend.array, (feats, weight, bias, grad_out))
    out = backend.numpy(flexgemm.submanifold_conv3d(x, w, neighbor_map=nmap))
    with_bias = backend.numpy(flexgemm.submanifold_conv3d(x, w, b, neighbor_map=nmap))
    gradients = flexgemm.submanifold_conv3d_backward(g, x, w, neighbor_map=nmap)

    def inner(left, right):
        return (f64(left) * f64(right)).sum()

    grad_feats, grad_weight, grad_bias = map(backend.numpy, gradients)
    terms = abs(f64(out) * f64(grad_out)).sum() + 1
    tolerance = verdicts.ROW_TOLERANCE[dtype] * terms
    assert abs(inner(out, grad_out) - inner(feats, grad_feats)) <= tolerance
    assert abs(inner(out, grad_out) - inner(weight, grad_weight)) <= tolerance
    terms += abs(f64(with_bias) * f64(grad_out)).sum()
    difference = inner(with_bias, grad_out) - inner(out, grad_out)
    assert abs(difference - inner(bias, grad_bias)) <= verdicts.ROW_TOLERANCE[dtype] * terms


@given(voxels(min_size=1), kernels, channels, channels, modes, seeds)
def test_every_pass_repeats_bit_for_bit(backend, scene, kernel_size, ci, co, dtype, seed):
    coords, shape = scene
    feats, weight, bias, grad_out = problem(seed, len(coords), ci, co, kernel_size, dtype)
    nmap, transposed = (reference.neighbor_map(coords, shape, kernel_size, transposed=t) for t in (False, True))
    runs = [
        (
            guarded.conv_forward(backend, feats, weight, bias, nmap),
            guarded.conv_dgrad(backend, grad_out, weight, transposed),
            *guarded.conv_wgrad(backend, grad_out, feats, nmap),
        )
        for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        assert_same_bits(second, first)


fp8 = st.sampled_from(["float8_e4m3fn", "float8_e5m2"])


@given(st.integers(0, 80), st.integers(1, 80), st.integers(0, 200), fp8, fp8, seeds)
def test_any_product_meets_the_oracle_and_repeats(backend, m, n, k, dtype_a, dtype_b, seed):
    rng = np.random.default_rng(seed)
    a, b = (scenes.values(rng, s, d, one_sign=n < 64) for s, d in (((m, k), dtype_a), ((n, k), dtype_b)))
    out = guarded.gemm(backend, a, b, "float32")
    assert_gemm_rows(out, reference.gemm(a, b), "float32")
    assert_same_bits(guarded.gemm(backend, a, b, "float32"), out)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 9), st.integers(1, 80), seeds)
def test_groups_are_dense_products_side_by_side(backend, sizes, left_over, n, seed):
    rng = np.random.default_rng(seed)
    rows, groups, k = sum(sizes) + left_over, len(sizes), 48
    a, b = (scenes.values(rng, s, "float8_e4m3fn", one_sign=n < 64) for s in ((rows, k), (groups, n, k)))
    ends = np.cumsum(sizes).astype(np.int32)
    initial = np.full((rows, n), 7, np.float32)
    out = guarded.gemm(backend, a, b, "float32", offsets=ends, initial=initial)
    for g, (begin, end) in enumerate(reference.group_bounds(ends, groups)):
        assert_gemm_rows(out[begin:end], f64(guarded.gemm(backend, a[begin:end], b[g], "float32")), "float32")
    assert (out[sum(sizes) :] == 7).all()


@given(st.integers(0, 40), st.integers(1, 300), fp8, st.sampled_from(["tensor", "row"]), st.floats(-40, 37), seeds)
def test_any_cast_is_numpy_s_bit_for_bit(backend, m, k, dtype, granularity, exponent, seed):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = (rng.standard_normal((m, k)) * 10.0**exponent).astype(np.float32)
    q, scale = guarded.quantize(backend, x, dtype, granularity)
    expected, expected_scale = reference.quantize(x, dtype, granularity)
    assert_same_bits(scale, expected_scale, "scale")
    assert_same_bits(q, expected, "q")


@given(st.integers(1, 40), st.integers(1, 300), st.integers(-20, 20), seeds)
def test_a_cast_scales_with_powers_of_two(backend, m, k, power, seed):
    x = scenes.values(np.random.default_rng(seed), (m, k), "float32")
    assume(abs(x).max() > 1e-3)
    q, scale = guarded.quantize(backend, x, "float8_e4m3fn", "tensor")
    again, larger = guarded.quantize(backend, x * np.float32(2.0**power), "float8_e4m3fn", "tensor")
    assert_same_bits(again, q)
    assert larger == scale * np.float32(2.0**power)
