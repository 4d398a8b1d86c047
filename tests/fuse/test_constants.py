"""Constants on a GPU are made once, and never in the memory of a recorded graph; on a GPU that is not there."""

import math
from collections.abc import Iterator

import pytest
import torch
from support.pretended_gpu import PretendedGpu

from shoal.fuse.constants import constant, making_constants, to_device
from shoal.fuse.randomness import keep_mask, member_keys

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as gpu:
        yield gpu


def test_a_constant_is_copied_to_a_gpu_once(gpu: PretendedGpu) -> None:
    values = (0.1, 1 / 3, 123.456)
    first = constant(values, torch.float32, CUDA)
    with gpu.counting() as counts:
        assert constant(values, torch.float32, CUDA) is first
        assert constant(list(values), torch.float32, CUDA) is first
    assert not counts.waits
    assert not counts.launches
    assert torch.equal(first, torch.tensor(values, device=CUDA))
    assert constant(values, torch.float64, CUDA).tolist() == list(values)


def test_numbers_that_compare_equal_are_constants_of_their_own(gpu: PretendedGpu) -> None:
    signs = [math.copysign(1.0, constant([zero], torch.float64, CUDA).item()) for zero in (0.0, -0.0, 0.0)]
    assert signs == [1.0, -1.0, 1.0]
    assert constant([math.nan], torch.float64, CUDA).isnan().item()


def test_a_constant_on_a_cpu_is_not_kept() -> None:
    assert constant((0.25,), torch.float32, CPU) is not constant((0.25,), torch.float32, CPU)


def test_a_constant_made_in_inference_mode_can_be_trained_with(gpu: PretendedGpu) -> None:
    weight = torch.ones(2, device=CUDA, requires_grad=True)
    with torch.inference_mode():
        constant((77.0, 78.0), torch.float32, CUDA)
    (weight * constant((77.0, 78.0), torch.float32, CUDA)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [77.0, 78.0]


def test_no_constant_is_made_in_the_memory_of_a_graph(gpu: PretendedGpu) -> None:
    """It would be overwritten by the next replay, and read by every later step."""
    keys = torch.tensor(member_keys([1, 2], [0, 0]))
    before = constant((5.5,), torch.float32, CUDA)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    assert constant((5.5,), torch.float32, CUDA) is before
    with pytest.raises(RuntimeError, match="a step that is recorded needs a constant"):
        constant((6.5,), torch.float32, CUDA)
    with pytest.raises(RuntimeError, match="a step that is recorded needs a constant"):
        keep_mask(keys, (12345,), (0.5,), CUDA)
    graph.capture_end()
    assert constant((6.5,), torch.float32, CUDA).tolist() == [6.5]


def test_what_is_kept_is_complete_before_another_stream_reads_it(gpu: PretendedGpu) -> None:
    with gpu.counting() as counts, making_constants(CUDA):
        torch.ones(3, device=CUDA)
    assert [name.partition(" ")[0] for name in counts.waits] == ["synchronize"]


def test_numbers_of_a_step_go_to_a_gpu_without_a_wait(gpu: PretendedGpu) -> None:
    with gpu.counting() as counts:
        moved = to_device(torch.arange(3), CUDA)
    assert moved.device == CUDA
    assert not counts.waits
    assert counts.launches == {"_to_copy": 1}
    host = torch.arange(3)
    assert to_device(host, CPU) is host
