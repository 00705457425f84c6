"""What a parameter sharded over several ranks (a DTensor) needs; nothing else here knows of them."""

import math
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    # No DTensor exists before its module is imported, and importing it costs every user half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def mesh_of(tensor: Tensor) -> "DeviceMesh | None":
    """The ranks a tensor is spread over; one foreach call cannot mix two meshes."""
    return tensor.device_mesh if _is_sharded(tensor) else None


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every rank (a collective call for a sharded one)."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def layout_of(tensor: Tensor) -> tuple[torch.device, torch.dtype, object]:
    """Alike for tensors whose sums one collective can take together."""
    cut = (tensor.device_mesh, tensor.placements) if _is_sharded(tensor) else None
    return tensor.device, tensor.dtype, cut


def sums_of(tensors: "list[Tensor]") -> Tensor:
    """The sum of each, none of which is negative: (tensors,), at least float32, whole on every rank.

    They have one layout.
    """
    parts, dtype = [local(tensor) for tensor in tensors], torch.promote_types(tensors[0].dtype, torch.float32)
    if parts[0].device.type == "cpu":
        sums = torch.stack([part.sum(dtype=dtype) for part in parts])  # its norms add up in sequence
    else:
        sums = torch.stack(torch._foreach_norm(parts, 1, dtype))
    return _over_ranks(sums, tensors[0])


def sums_of_gradients(grads: "list[Tensor]") -> "list[Tensor]":
    """For each layout among them (2,) float64, whole on every rank: the sum of squares, and 0 or, if a
    gradient has a NaN or Inf, NaN."""
    alike: dict[object, list[Tensor]] = {}
    for grad in grads:
        alike.setdefault(layout_of(grad), []).append(grad)
    found = []
    for own in alike.values():
        both = torch.zeros(2, dtype=torch.float64, device=own[0].device)
        parts = [part for part in map(local, own) if part.numel()]  # a rank may have none
        if parts:
            dtype = torch.promote_types(parts[0].dtype, torch.float32)
            squares, most = (torch.stack(torch._foreach_norm(parts, order, dtype)) for order in (2, math.inf))
            # A squared norm may overflow where all is finite. 0 times what is not is NaN, and a NaN survives
            # the sum over tensors and ranks.
            both[0], both[1] = squares.abs().double().square().sum(), (most.abs().double() * 0).sum()
        found.append(_over_ranks(both, own[0]))
    return found


def _over_ranks(sums: Tensor, like: Tensor) -> Tensor:
    """Sums over this rank's part of a tensor, or of several of its layout, as those over the whole."""
    if not _is_sharded(like):
        return sums
    kinds = sys.modules["torch.distributed.tensor"]
    placements = [kinds.Partial() if p.is_shard() else kinds.Replicate() for p in like.placements]
    spread: Tensor = kinds.DTensor.from_local(sums, like.device_mesh, placements, run_check=False)
    return whole(spread)


def sharded_like(value: Tensor, tensor: Tensor) -> Tensor:
    """A full tensor, the same on every rank, cut as another one is cut; without communication."""
    if not _is_sharded(tensor) or _is_sharded(value):
        return value
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    whole_value: Tensor = distribute(
        value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    return whole_value


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; of sharded ones, this rank's parts."""
    return torch.equal(local(a), local(b))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def is_writer() -> bool:
    """Whether this process writes what all ranks agree on."""
    return not _is_distributed() or torch.distributed.get_rank() == 0


def share_failure(failure: Exception | None) -> None:
    """Wait for all ranks; if the writer failed, raise on every one of them."""
    if failure is not None and not _is_distributed():
        raise failure
    if _is_distributed():
        message = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        torch.distributed.broadcast_object_list(message, src=0)
        if failure is not None:
            raise failure
        if message[0] is not None:
            raise RuntimeError(f"rank 0 could not write: {message[0]}")


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
