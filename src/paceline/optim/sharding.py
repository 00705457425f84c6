"""Functions for parameters sharded over several ranks. No other file of `optim` knows of DTensors."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor."""
    if type(tensor) in (Tensor, Parameter):
        return False
    # No DTensor exists before its module is imported, and importing it costs every user half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, and any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank; a collective call for a sharded one."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def any_nonzero(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether any element is not 0; a collective call for sharded tensors, the same on all ranks."""
    found = [whole((tensor != 0).any()) for tensor in tensors if tensor is not None]
    return any(bool(each) for each in found)


def layout_of(tensor: Tensor) -> object:
    """Return how a tensor is cut over ranks; None if it is not."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None


def sharded_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return a full tensor, the same on every rank, cut as `tensor` is; without communication."""
    if not is_sharded(tensor) or is_sharded(value):
        return value
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    cut: Tensor = distribute(
        value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    return cut


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; of sharded ones, this rank's parts."""
    return torch.equal(local(a), local(b))


def is_writer() -> bool:
    """Return whether this process writes what all ranks agree on."""
    return not _is_distributed() or torch.distributed.get_rank() == 0


def share_failure(failure: Exception | None) -> None:
    """Wait for all ranks; if the writer failed, raise on every one of them."""
    message = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    if _is_distributed():
        torch.distributed.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    if message[0] is not None:
        raise RuntimeError(f"rank 0 could not write: {message[0]}")


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
