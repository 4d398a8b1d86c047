"""The GPU that tests pretend to have: what it counts, and what it refuses as a device would."""

from contextlib import nullcontext

import pytest
import torch
from support.pretended_gpu import PretendedGpu
from torch import Tensor

CUDA = torch.device("cuda", 0)


def test_what_is_made_on_the_gpu_or_of_what_is_there_says_so():
    with PretendedGpu() as gpu:
        made = torch.ones(3, device=CUDA)
        net = torch.nn.Linear(3, 2)
        gpu.claim(net)
        out = net(made)
        out.sum().backward()
        there = [made, made[1:], made * 2, made.new_zeros(2), out, net.weight.grad, torch.tensor([1.0], device=CUDA)]
        assert [tensor.device for tensor in there] == [CUDA] * 7
        assert all(tensor.is_cuda and not tensor.is_cpu for tensor in there)
        assert torch.ones(3).device.type == made.cpu().device.type == made.to("cpu").device.type == "cpu"
        assert torch.ones(3).to(made).device == torch.ones(3).cuda().device == CUDA
        assert made.tolist() == [1.0] * 3
    assert made.device.type == "cpu"


@pytest.mark.parametrize(
    ("wait", "function"),
    [
        ("_local_scalar_dense", lambda x: x[0].item()),
        ("_local_scalar_dense", lambda x: bool(x.sum() > 0)),
        ("tolist", lambda x: x.tolist()),
        ("to host", lambda x: x.cpu()),
        ("nonzero", lambda x: x.nonzero()),
        ("index by a mask", lambda x: x[x > 0]),
        ("index by a tensor of the host", lambda x: x[torch.tensor([0])]),
        ("equal", lambda x: torch.equal(x, x.clone())),
        ("copy_ to device", lambda x: x.copy_(torch.ones(4))),
        ("copy_ to host", lambda x: torch.ones(4).copy_(x)),
        ("_to_copy to device", lambda x: torch.ones(4).to(x.device, non_blocking=True)),
        ("tensor of the host's numbers", lambda x: torch.tensor([1.0], device=x.device)),
        ("synchronize", lambda x: torch.cuda.synchronize()),
    ],
)
def test_where_the_host_waits_is_counted(wait, function):
    with PretendedGpu() as gpu:
        x = torch.ones(4, device=CUDA)
        with gpu.counting() as counts:
            function(x)
    assert [name.rpartition(" (")[0] for name in counts.waits] == [wait]


def test_what_does_not_wait_is_not_counted():
    with PretendedGpu() as gpu:
        x, host = torch.ones(4, device=CUDA), torch.empty(4, pin_memory=True)
        with gpu.counting() as counts:
            host.copy_(x, non_blocking=True)
            x.copy_(host, non_blocking=True)
            x[x > 0] = 2.0
            torch.where(x > 0, x * torch.tensor(2.0), 0.0).view(2, 2).sum(0)
    assert counts.waits.total() == 0
    assert counts.launches == {"copy_": 2, "gt": 2, "index_put_": 1, "mul": 1, "where": 1, "sum": 1}


def lists(count: int, size: int) -> list[Tensor]:
    return [torch.ones(4, size, device=CUDA) for _ in range(count)]


@pytest.mark.parametrize(
    ("launches", "function"),
    [
        (1, lambda: torch._foreach_mul_(lists(20, 8), 2.0)),
        (1, lambda: torch._foreach_mul_(lists(20, 8), lists(20, 8))),
        (2, lambda: torch._foreach_addcmul_(lists(60, 8), lists(60, 8), lists(60, 8))),
        (2, lambda: torch._foreach_mul_(lists(1, 400 * 65536 // 4), 2.0)),
        (20, lambda: torch._foreach_mul_(lists(20, 8), [torch.ones(4, 1, device=CUDA)] * 20)),
        (20, lambda: torch._foreach_mul_(lists(20, 8), [torch.ones(4, 1, device=CUDA).expand(4, 8)] * 20)),
    ],
)
def test_functions_of_many_tensors_launch_one_kernel_for_many_only_if_all_are_alike(launches, function):
    with PretendedGpu() as gpu, gpu.counting() as counts:
        function()
    assert sum(number for name, number in counts.launches.items() if name.startswith("_foreach")) == launches


def test_functions_of_tensors_on_two_devices_are_refused():
    with PretendedGpu():
        x = torch.ones(4, device=CUDA)
        assert (x * torch.tensor(2.0)).device == CUDA
        with pytest.raises(RuntimeError, match=r"same device, but got cpu and cuda:0 \(mul\)"):
            x * torch.ones(4)
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.numpy()


@pytest.mark.parametrize("kernel", ["adam", "sgd"])
def test_fused_kernels_of_two_dtypes_are_refused(kernel):
    with PretendedGpu():
        for dtypes, message in (((torch.float32, torch.bfloat16), "must have same dtype"), ((torch.bfloat16,), None)):
            params = [torch.ones(3, dtype=dtype, device=CUDA, requires_grad=True) for dtype in dtypes]
            for param in params:
                param.grad = torch.ones_like(param)
            made, count = [torch.zeros_like(param) for param in params], [torch.ones((), device=CUDA) for _ in params]
            grads, rates = [param.grad for param in params], {"lr": 0.1, "weight_decay": 0.0, "maximize": False}
            with torch.no_grad(), pytest.raises(RuntimeError, match=message) if message else nullcontext():
                if kernel == "adam":
                    more = {"beta1": 0.9, "beta2": 0.9, "eps": 0.1, "amsgrad": False}
                    torch._fused_adam_(params, grads, made, made, [], count, **rates, **more)
                else:
                    more = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
                    torch._fused_sgd_(params, grads, made, **rates, **more)


def test_a_graph_runs_again_in_the_same_memory_as_one_launch_and_cannot_wait():
    with PretendedGpu() as gpu:
        x, total = torch.arange(3.0, device=CUDA), torch.zeros(3, device=CUDA)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        assert torch.cuda.is_current_stream_capturing()
        doubled = x * 2
        total.add_(doubled[1:].sum())
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            x.sum().item()
        graph.capture_end()
        x.fill_(5.0)
        total.zero_()
        with gpu.counting() as counts:
            graph.replay()
        assert counts.launches == {"graph": 1}
        assert counts.in_graphs == {"mul": 1, "sum": 2, "add_": 1}
        assert (doubled.tolist(), total.tolist()) == ([10.0] * 3, [20.0] * 3)


def test_what_a_graph_writes_while_it_is_recorded_is_undone():
    with PretendedGpu():
        total = torch.ones(3, device=CUDA)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        total.add_(1.0).mul_(3.0)
        graph.capture_end()
        assert total.tolist() == [1.0] * 3
        graph.replay()
        graph.replay()
        assert total.tolist() == [21.0] * 3
