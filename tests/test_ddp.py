"""Several processes: each has its share of a batch, and losses, gradients and statistics are those of one process that
has it all. On CUDA each has a GPU of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import scenes

torch = pytest.importorskip("torch", reason="torch not installed")
pytest.importorskip("matplotlib", reason="matplotlib not installed")
pytest.importorskip("tqdm", reason="tqdm not installed")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from test_examples import EXAMPLES, load  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

import flexgemm.torch.nn as fnn  # noqa: E402

PROCESSES = 2
SHARES = ((37, 4), (41, 0))  # rows of each process
PATCH, BATCH, STEPS = 16, 3, 4  # of three patches a step one process gets two


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- what one process does, with its share or with everything ----


def normalise(rows, sample, process_group=None):
    """Two training steps of a batch norm, and the gradients after the second."""
    torch.manual_seed(0)
    coords = torch.nn.functional.pad(torch.arange(len(rows), device=rows.device)[:, None], (1, 2)).int()
    x = fnn.SparseTensor(rows.requires_grad_(), coords, (1, 64, 1, 1))
    norm = torch.nn.Sequential(fnn.BatchNorm(5, momentum=None))
    layer = fnn.SyncBatchNorm.convert_sync_batchnorm(norm, process_group)
    layer.to(rows.device)
    torch.nn.init.normal_(layer[0].weight)
    for _ in range(2):
        y = layer(x).feats
    (y * sample).sum().backward()
    return y.detach(), rows.grad, layer[0].weight.grad, layer[0].bias.grad, layer.state_dict()


def share_of(numbers, shares, rank):
    return [part.split(shares)[rank].clone() for part in numbers]


def rows_and_gradient(device):
    numbers = torch.randn(2, 41, 5, generator=torch.Generator().manual_seed(1)).to(device)
    return 3 * numbers[0] + 7, numbers[1]


def train_the_example(device):
    """The losses, and how far each parameter and statistic went."""
    unet = load("terrain_unet")
    unet.PATCH = PATCH
    torch.manual_seed(0)
    heights = 2 * torch.randn(40, 40)
    labels = torch.randint(-1, 3, heights.shape)
    labels[:20] = unet.UNKNOWN  # patches differ in how many of their voxels count
    network = unet.UNet(in_channels=3, classes=3, channels=(8, 8)).to(device)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    # Adam makes a full step of a gradient that is nothing but rounding.
    with mock.patch.object(torch.optim, "AdamW", torch.optim.SGD):
        losses, rate = unet.train(network, heights.to(device), labels.to(device), STEPS, BATCH)
    assert rate > 0
    return losses, {name: value - before[name] for name, value in network.state_dict().items()}


def sample(index, device):
    """One of a batch."""
    coords, shape = scenes.scene(40, batch=1, seed=index)
    numbers = torch.randn(len(coords), 5, generator=torch.Generator().manual_seed(index))
    return fnn.SparseTensor(numbers.to(device), torch.from_numpy(coords).to(device), shape)


def small_network(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(fnn.SubMConv3d(5, 6), fnn.ReLU(), fnn.SparseConv3d(6, 4, 2, 2)).to(device)


def distributed(network):
    return torch.nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)


def sharded(network, **options):
    mesh = init_device_mesh(network[0].weight.device.type, (PROCESSES,))
    for layer in (network[0], network[2], network):
        fully_shard(layer, mesh=mesh, **options)
    return network


def of_a_static_graph(network):
    return torch.nn.parallel.DistributedDataParallel(network, static_graph=True)


class TwoHeads(torch.nn.Module):
    """The loss needs the first output alone."""

    def __init__(self, network):
        super().__init__()
        self.network, self.other = network, fnn.SubMConv3d(4, 2).to(network[0].weight.device)

    def forward(self, x):
        y = self.network(x)
        return y, self.other(y)


def with_an_unused_output(network):
    model = distributed(TwoHeads(network))
    return lambda x: model(x)[0]


WRAPS = {
    "distributed": distributed,
    "static graph": of_a_static_graph,
    "unused output": with_an_unused_output,
    "sharded": sharded,
}


def gradients_of(wrap, samples, device):
    """Of the mean over samples, in the second step: what was wrong in the first one torch says in the next."""
    network = small_network(device)
    model, number = wrap(network), len(samples)
    for _ in range(2):
        network.zero_grad()
        for x in samples:
            (model(x).feats.square().sum() / number).backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


def in_16_bits(x):
    """What a sharded network whose layers compute in bfloat16 gives, and its gradients' dtypes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    network = sharded(small_network(x.device), mp_policy=policy)
    y = network(x)
    y.feats.sum().backward()
    return y.feats.detach(), [str(parameter.grad.dtype) for parameter in network.parameters()]


# ---- several processes ----


def of_process(rank, folder, kind):
    torch.set_num_threads(1)
    device = torch.device(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    where, backend = f"file://{folder}/rendezvous", "nccl" if kind == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=where, rank=rank, world_size=PROCESSES)
    numbers = rows_and_gradient(device)
    normalised = [normalise(*share_of(numbers, shares, rank)) for shares in SHARES]
    by_themselves = [torch.distributed.new_group([process]) for process in range(PROCESSES)]
    normalised.append(normalise(*share_of(numbers, SHARES[0], rank), by_themselves[rank]))
    wrapped = {name: gradients_of(wrap, [sample(rank, device)], device) for name, wrap in WRAPS.items()}
    results = normalised, train_the_example(device), wrapped, in_16_bits(sample(rank, device))
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def processes(device, tmp_path_factory):
    """What each gave: (its batch norms, its training, gradients by kind of wrapper, what it gave in 16 bits)."""
    if device.type == "cuda" and torch.cuda.device_count() < PROCESSES:
        pytest.skip("needs two CUDA devices")
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(of_process, (folder, device.type), PROCESSES)
    return [torch.load(folder / f"{rank}.pt", map_location=device) for rank in range(PROCESSES)]


@contextlib.contextmanager
def way_of_several():
    """One process takes the way of several: it is one of two, and the other has no rows."""
    several = {"is_initialized": lambda: True, "get_world_size": lambda group: 2, "get_rank": lambda group: 1}
    with mock.patch.multiple(torch.distributed, all_reduce=mock.Mock(), **several):
        yield
        assert torch.distributed.all_reduce.called


@pytest.mark.parametrize("case", range(len(SHARES)), ids=map(str, SHARES))
def test_batch_norm_takes_the_statistics_of_all_processes(device, processes, case):
    parts, whole = [normalised[case] for normalised, *_ in processes], normalise(*rows_and_gradient(device))
    y, grad_x, grad_weight, grad_bias, states = zip(*parts, strict=True)
    for by_rows, expected in zip((y, grad_x), whole[:2], strict=True):
        close(torch.cat(by_rows), expected)
    for of_parameters, expected in zip((grad_weight, grad_bias), whole[2:4], strict=True):
        close(sum(of_parameters), expected)
    for state in states:
        close(state, whole[4])


def test_batch_norm_takes_the_statistics_of_its_process_group(device, processes):
    for rank, ([*_, alone], *_) in enumerate(processes):
        close(alone, normalise(*share_of(rows_and_gradient(device), SHARES[0], rank)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_batch_norm_has_the_dtype_of_its_network(device, dtype, momentum):
    """As torch's."""
    rows = rows_and_gradient(device)[0].to(dtype)
    layer, expected = (
        norm(5, momentum=momentum).to(device, dtype) for norm in (fnn.SyncBatchNorm, torch.nn.BatchNorm1d)
    )
    with way_of_several():
        y = layer(rows)
    tolerance = {"rtol": 0.02, "atol": 0.01}
    torch.testing.assert_close(y, expected(rows), **tolerance)
    torch.testing.assert_close(layer.state_dict(), expected.state_dict(), **tolerance)


@pytest.mark.parametrize("shape", [(41, 5), (7, 5, 6)], ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_batch_norm_takes_what_that_of_torch_takes(device, dtype, options, shape):
    """Rows of float16 with parameters of float32, too, as under autocast. The oracle is torch's in float64."""
    x, grad_y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    norm, expected = fnn.SyncBatchNorm(5, **options).to(device), torch.nn.BatchNorm1d(5, **options).to(device)
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    expected.load_state_dict(norm.state_dict())

    def results(layer, x, grad_y):
        y = layer(x.requires_grad_())
        y.backward(grad_y)
        return [y, x.grad, *(parameter.grad for parameter in layer.parameters()), *layer.state_dict().values()]

    with way_of_several():
        actual = results(norm, x, grad_y)
    assert actual[0].dtype == actual[1].dtype == dtype
    for a, b in zip(actual, results(expected.double(), x.detach().double(), grad_y.double()), strict=True):
        close(a.double(), b.double(), 1e-5 if dtype is torch.float32 else 3e-3)


def test_the_gradient_of_a_gradient_of_batch_norm_is_refused(device):
    """It depends on x, whether the gradient that came in does or not."""
    x = torch.randn(7, 5, device=device, requires_grad=True)
    with way_of_several():
        y = fnn.SyncBatchNorm(5).to(device)(x)
        (gradient,) = torch.autograd.grad((y * torch.arange(5.0, device=device)).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_norm_learns_nothing_of_no_rows_and_no_variance_of_one(device, rows):
    layer = fnn.SyncBatchNorm(5, momentum=0.5).to(device)
    with way_of_several():
        layer(torch.ones(rows, 5, device=device))
    close(layer.running_mean, torch.full((5,), 0.5 * rows, device=device))
    close(layer.running_var, torch.full((5,), 1 - 0.5 * rows, device=device))


def test_batch_norm_asks_no_other_process_in_evaluation(device):
    rows = rows_and_gradient(device)[0]
    layer, expected = (norm(5).to(device).eval() for norm in (fnn.SyncBatchNorm, torch.nn.BatchNorm1d))
    several = {"is_initialized": lambda: True, "get_world_size": lambda group: 2, "all_reduce": mock.Mock()}
    with mock.patch.multiple(torch.distributed, **several):
        assert torch.equal(layer(rows), expected(rows))
        assert not torch.distributed.all_reduce.called


def test_training_in_two_processes_is_training_in_one(device, processes):
    (losses, ways), trained = train_the_example(device), [training for _, training, *_ in processes]
    for losses_of_part, ways_of_part in trained:
        np.testing.assert_allclose(losses_of_part, losses, rtol=1e-6)
        for name, way in ways.items():
            error = (ways_of_part[name] - way).double().norm() / way.double().norm()
            assert error < 1e-4, name
    assert all(torch.equal(trained[0][1][name], trained[1][1][name]) for name in ways)


@pytest.mark.parametrize("name", WRAPS)
def test_wrappers_find_the_features_in_a_sparse_tensor(device, processes, name):
    """The mean over processes, of which each has a sample."""
    whole = gradients_of(lambda network: network, [sample(rank, device) for rank in range(PROCESSES)], device)
    for _, _, wrapped, _ in processes:
        for got, expected in zip(wrapped[name], whole, strict=True):
            close(got, expected, 1e-4)


def test_a_sharded_network_in_16_bits(device, processes):
    for rank, (*_, (y, dtypes)) in enumerate(processes):
        assert y.dtype is torch.float32 and set(dtypes) == {"torch.float32"}
        close(y, small_network(device)(sample(rank, device)).feats, 3e-2)


def test_the_example_under_torchrun(tmp_path):
    """The first process reports, once; the others say nothing."""
    root, out = Path(__file__).parent.parent, tmp_path / "picture.png"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    example = [EXAMPLES / "terrain_unet.py", "--steps", "2", "--batch", "2", "--device", "cpu", "--out", out]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([*run, *example], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("samples per second, 2 x cpu") == done.stdout.count("U-Net") == 1
