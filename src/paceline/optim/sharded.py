"""What a parameter sharded over several ranks (a DTensor) needs; nothing else here knows of them."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_USUAL = (Tensor, Parameter)


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    if type(tensor) in _USUAL:
        return False
    # No DTensor exists before its module is imported, and importing it costs every user half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the tensors is sharded."""
    return any(map(_is_sharded, tensors))


def drop_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered in a model, and put the sharded parameters back into it.

    Some modules keep what they gathered after a forward pass. If the shards then change, the copies are of
    other weights.
    """
    # No such module exists before torch's own module is imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def mesh_of(tensor: Tensor) -> "DeviceMesh | None":
    """The ranks a tensor is spread over; one foreach call cannot mix two meshes."""
    return tensor.device_mesh if _is_sharded(tensor) else None


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every rank (a collective call for a sharded one)."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def cut_of(tensor: Tensor) -> object:
    """How a tensor is cut over ranks; None: it is not."""
    return (tensor.device_mesh, tensor.placements) if _is_sharded(tensor) else None


def layout_of(tensor: Tensor) -> tuple[torch.device, torch.dtype, object]:
    """Alike for tensors whose sums can be taken together."""
    return tensor.device, tensor.dtype, cut_of(tensor)


# --- Sums over all ranks ----------------------------------------------------------------------------


class OverRanks:
    """Sums that are asked for one after another, then added up over ranks all at once.

    That takes one collective for each set of ranks, and none for tensors that are not cut.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[torch.device, DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
        self._added: dict[object, list[Tensor]] = {}

    def ask(self, sums: Tensor, like: Tensor) -> Callable[[], Tensor]:
        """Sums over this rank's part of tensors that are cut like that one.

        What is returned gives those over the whole tensors, on every rank. Nothing can be asked after it.
        """
        # Whatever is no copy is a part, which a placement of FSDP2 around tensor parallelism does not say.
        cuts = enumerate(like.placements) if _is_sharded(like) else ()
        dimensions = tuple(i for i, placement in cuts if not placement.is_replicate())
        mesh = mesh_of(like)
        if mesh is None or all(mesh.size(i) == 1 for i in dimensions):
            return lambda: sums
        key = sums.device, mesh, dimensions
        asked = self._asked.setdefault(key, [])
        place = len(asked)
        asked.append(sums)
        return lambda: self._add(key)[place]

    def _add(self, key: "tuple[torch.device, DeviceMesh, tuple[int, ...]]") -> list[Tensor]:
        if key not in self._added:
            (_, mesh, dimensions), asked = key, self._asked[key]
            # Parts that are kept in the host's memory are added up where the ranks' devices are.
            total = torch.cat([sums.double().flatten() for sums in asked]).to(mesh.device_type)
            for i in dimensions:
                torch.distributed.all_reduce(total, group=mesh.get_group(i))
            pieces = zip(torch.split(total, [sums.numel() for sums in asked]), asked, strict=True)
            self._added[key] = [piece.view(sums.shape).to(sums) for piece, sums in pieces]
        return self._added[key]


def sums_of(tensors: "list[Tensor]") -> Tensor:
    """The sum of each, none of which is negative: (tensors,), at least float32; of this rank's parts.

    They have one layout.
    """
    parts, dtype = [local(tensor) for tensor in tensors], torch.promote_types(tensors[0].dtype, torch.float32)
    if parts[0].device.type == "cpu":
        sums = torch.stack([part.sum(dtype=dtype) for part in parts])  # its norms add up in sequence
    else:
        sums = torch.stack(torch._foreach_norm(parts, 1, dtype))
    return sums


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
    if not _is_sharded(tensor):
        return tensor
    # Of a parameter torch's to_local() makes a view, each time.
    return tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor


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
