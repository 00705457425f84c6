"""Training of one model by several processes: shares of the data, communication, sharding.

No other module depends on the number of processes. A single process is `ALONE`, and does not communicate.
Started by torchrun, each process is a rank:

.. code-block:: text

    samples of a step, the same for any number of ranks → a share for each rank → gradients, summed over ranks
        → loss, norm of the gradient and "was I asked to stop?", summed in one message → all do the same

With DDP every rank has the whole model. With FSDP2 weights, gradients and the optimizer's state are cut into
shards.
"""

import hashlib
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, final

import torch
from torch import Tensor, nn

from paceline.lm.batch import Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

# A message of a step that does not come: the first may wait for others to compile.
_STEP_TIMEOUT = timedelta(minutes=10)
# Ranks wait this long while one prepares data or writes. A rank that dies is noticed immediately even so.
_PATIENCE = timedelta(days=1)
_PORT = "paceline-port"


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranks:
    """The processes of a run, seen from one of them.

    All ranks must call the methods marked as collective, in the same order.

    >>> ALONE.is_first, ALONE.rounds(5, 2)
    (True, [range(0, 2), range(2, 4), range(4, 5)])
    >>> Ranks(rank=1, size=2).rounds(5, 2)  # rank 0 has samples 0 and 1, and none in round 2
    [range(2, 4), range(4, 5)]
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """The device of this rank; None: that of the run's settings, for a single process."""
    mesh: "DeviceMesh | None" = None
    """The mesh over which weights are cut into shards; None: every rank has all weights."""
    host: "ProcessGroup | None" = None
    """The process group for messages between CPUs."""

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes files and prints."""
        return self.rank == 0

    # --- Shares ---

    def rounds(self, count: int, size: int) -> list[range]:
        """Return this rank's share of range(count), in ranges of at most `size`.

        All ranks have equally many ranges; the last one may be empty.
        """
        own = range(self.rank * count // self.size, (self.rank + 1) * count // self.size)
        most = -(-count // self.size)
        return [own[at : at + size] for at in range(0, most, size)]

    def parts(self, batch: Batch, size: int) -> list[Batch]:
        """Return this rank's share of a batch, in parts of at most `size` samples.

        All ranks have equally many parts. An empty part is replaced by a sample without targets, whose
        gradient is 0, because collectives inside of the model need all ranks.
        """
        rounds = self.rounds(len(batch.tokens), size)
        return [batch.at(own) if own else batch.at(range(1)).without_targets() for own in rounds]

    def reseed(self, seed: int, step: int) -> None:
        """Seed the random numbers of a step, for dropout: different on each rank, the same if repeated.

        Does nothing for a single process, whose random generator is in its checkpoints.
        """
        if self.size > 1:
            hashed = hashlib.blake2b(f"{seed} {step} {self.rank}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(hashed) >> 1)

    # --- Sums and agreement: all of these are collective ---

    def step_totals(
        self, loss: Tensor, norm: Tensor, stop: Callable[[], bool]
    ) -> tuple[float, float, Tensor, bool]:
        """Return loss, gradient norm, the norm as a tensor, and whether any rank was asked to stop.

        The arguments are this rank's share; the result covers all ranks. It takes one message and one wait
        for the device.
        """
        if self.size == 1:
            known_loss, known_norm = torch.stack([loss, norm]).tolist()
            return known_loss, known_norm, norm, False
        # In float64, squares of float32 numbers neither overflow nor round.
        square = norm.double().square() / (self.size if self.mesh is None else 1)  # DDP's is of the whole
        sums = torch.stack([loss.double(), square, torch.full_like(square, float(stop()))])
        torch.distributed.all_reduce(sums)
        total = sums[1].sqrt().to(norm.dtype)
        known_loss, known_square, stops = sums.tolist()
        return known_loss, math.sqrt(known_square), total, stops > 0

    def summed(self, total: Tensor, count: int) -> tuple[float, int]:
        """Return the sums of a number on the device and a number on the host over all ranks."""
        if self.size == 1:
            return total.item(), count
        sums = torch.stack([total, torch.full_like(total, count)])
        torch.distributed.all_reduce(sums)
        known, counted = sums.tolist()
        return known, round(counted)

    def any(self, fact: bool) -> bool:
        """Return whether something is true on any rank."""
        if self.size == 1:
            return fact
        found = torch.tensor(int(fact))
        torch.distributed.all_reduce(found, group=self.host)
        return bool(found)

    def should_stop(self, stop: Callable[[], bool], agreed: bool | None) -> bool:
        """Return whether to stop before the next step.

        Several ranks stop if they agreed so in the last step (`agreed`); a single process asks `stop` now.
        """
        if self.size > 1 and agreed is not None:
            return agreed
        return self.any(stop())

    def of_first(self, work: Callable[[], T]) -> T:
        """Run work on the first rank only; return its result, or raise its error, on all ranks."""
        if self.size == 1:
            return work()
        said: list[Any] = [None, None]
        if self.is_first:
            try:
                said[0] = work()
            except Exception as error:
                said[1] = _portable(error)
        torch.distributed.broadcast_object_list(said, src=0, group=self.host)
        if said[1] is not None:
            raise said[1]
        return said[0]  # type: ignore[no-any-return]

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, when all have come here."""
        if self.size == 1:
            return [value]
        said: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(said, value, group=self.host)
        return said

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor; of a sharded one all of it, in host memory, and nothing on ranks but the first."""
        if not is_sharded(tensor):
            return tensor
        gathered = tensor.full_tensor()
        return gathered.cpu() if self.is_first else gathered.new_empty(0)

    # --- The model ---

    def spread(self, model: nn.Module, device: torch.device) -> tuple[nn.Module, nn.Module]:
        """Distribute a model; return it, and the module to call in training, which sums gradients.

        The weights must be equal on all ranks, as they are after the same seed.
        """
        if self.mesh is not None:
            return _sharded(model, self.mesh)
        model = model.to(device)
        if self.size == 1:
            return model, model
        from torch.nn.parallel import DistributedDataParallel

        ids = [device.index] if device.type == "cuda" else None
        with warnings.catch_warnings():
            # torch 2.13 renamed the argument; earlier versions do not know the new name.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            called = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
        called.register_comm_hook(None, lambda state, bucket: _summed(bucket))
        # Against a deadlock at exit: DDP's reducer must not be the last to release the process group, because
        # it would wait for the group's threads while it keeps Python's lock, which they may need. This
        # attribute, made last, is deleted last, and Python releases its lock for that.
        called.group_to_the_end = called.process_group  # type: ignore[assignment]
        return model, called

    def reducing(self, called: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return a context for a part of a step, which sums gradients over ranks if it is the last."""
        if self.size == 1:
            return nullcontext()
        if self.mesh is None:
            return nullcontext() if last else called.no_sync()  # type: ignore[operator]
        called.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()


ALONE = Ranks()


def _portable(error: Exception) -> Exception:
    """Return a copy of an error that can be sent to another process."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    kind = type(error)
    if kind.__module__.startswith("paceline.") or kind in (ValueError, RuntimeError):
        return kind(str(error))
    return RuntimeError(f"{kind.__name__}: {error}")


# --- How a model is spread ----------------------------------------------------------------------------


def _summed(bucket: Any) -> Any:
    """Sum gradients over ranks: each is already a share of the mean, which DDP would divide again."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _sharded(model: nn.Module, mesh: "DeviceMesh") -> tuple[nn.Module, nn.Module]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in (*_blocks(model), model):
        # Resharded after each forward pass: an average is shown in the shards, and would not appear in
        # whole weights that remain.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # The warning is about in-place changes of a model's output; summed_loss makes none.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)  # each rank's is already a share of the mean
    return model, model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model: the items of its outermost module lists."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


# --- Tensors in shards --------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is sharded over ranks."""
    # No sharded tensor exists before torch imports this module, and to import it takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor


def cut_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """Shard a tensor that is equal on all ranks as another one of its shape, without communication."""
    if not is_sharded(tensor) or whole.shape != tensor.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )


# --- Meeting the others -------------------------------------------------------------------------------


@contextmanager
def joined(*, how: str = "ddp", device: str = "auto") -> Iterator[Ranks]:
    """Yield the ranks that torchrun started, or `ALONE`.

    Arguments:
        how: "ddp" or "fsdp2".
        device: "cpu", "cuda", or "auto": GPUs if there are any, one for each rank.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    own = _device(device)
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    rank = int(os.environ["RANK"])
    # Kept to the end: without torchrun this store is in the first rank, and others may not have read it.
    kept, _, _ = next(rendezvous("env://", timeout=_STEP_TIMEOUT))
    on_gpu = own.type == "cuda"
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_store(kept, rank, size),
        rank=rank,
        world_size=size,
        timeout=_STEP_TIMEOUT,
        device_id=own if on_gpu else None,
    )
    host = distributed.new_group(backend="gloo", timeout=_PATIENCE)
    mesh = None
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(own.type, (size,))
    ranks = Ranks(rank=rank, size=size, device=own, mesh=mesh, host=host)
    try:
        yield ranks
        distributed.barrier(group=host)
    except BaseException:
        # No barrier: other ranks may have died.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    # torchrun sends SIGTERM to all ranks as soon as one has failed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    distributed.destroy_process_group()


def _store(kept: "Store", rank: int, size: int) -> "Store":
    """Return a store through which ranks find each other, opened by rank 0 for its lifetime."""
    # torchrun's own store survives a restart of the ranks, with the addresses of dead processes in it. So
    # only rank 0's port is read from it. If nobody answers there, it is an old one: wait for the new one.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = os.environ["MASTER_ADDR"]
    if rank == 0:
        opened = TCPStore(host, 0, size, True, _STEP_TIMEOUT, wait_for_workers=False)
        kept.set(_PORT, str(opened.port))
        return opened
    until = time.monotonic() + _STEP_TIMEOUT.total_seconds()
    while True:
        port = int(kept.get(_PORT))
        try:
            socket.create_connection((host, port), timeout=10).close()
            return TCPStore(host, port, size, False, _STEP_TIMEOUT)
        except OSError as error:
            if time.monotonic() > until:
                raise RuntimeError(f"rank 0 was not found at {host}, port {port}: {error}") from error
            time.sleep(0.2)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if name != "cuda":
        raise ValueError(f"device is {name!r}; allowed with several ranks: auto, cpu, cuda")
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise ValueError(f"rank {number} of this machine has no GPU: there are {there}; start fewer ranks")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
