"""The parameters of a group that take part in a step, and how to see that they are as they were at the last.

Most steps are like the one before, and to look at everything anew takes longer than to update a small tensor.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, MutableMapping
from functools import lru_cache
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_, not_
from typing import Any, NamedTuple, TypeVar, final
from weakref import ref

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Parameter

from paceline.optim import look
from paceline.optim.rule import Slot
from paceline.optim.sharded import cut_of, local
from paceline.optim.state import State, keeps, real, residual_key

States = MutableMapping[Tensor, State]
_ONE = torch.ones((), dtype=torch.float64, device="cpu")  # which a number would be made into at each step
T = TypeVar("T")


class Ages(NamedTuple):
    """How many steps each of several parameters has taken."""

    first: float  # the first of them; NaN: all are counted on the device
    younger: list[float]  # by how many steps each is younger; none, if all are of an age

    @staticmethod
    def of(counts: list[float]) -> "Ages":
        first = counts[0]
        same = counts.count(first) == len(counts)
        return Ages(first, [] if same else [first - count for count in counts])

    def at(self, place: int) -> float:
        """How many steps the one at that place has taken."""
        return self.first - self.younger[place] if self.younger else self.first


def slot_of(parameter: Tensor, grad: Tensor, state: State) -> Slot:
    """That of a parameter; of an average the code that stands for it until it is opened."""

    def held(name: str) -> Tensor:
        return real(state[name]) if name in state else state[residual_key(name)]

    return Slot(
        live=real(parameter),
        grad=real(grad),
        exp_avg=real(state["exp_avg"]) if "exp_avg" in state else None,
        exp_avg_sq=real(state["exp_avg_sq"]),
        average=held("average"),
        returned=held("returned") if keeps(state, "returned") else None,
        step=state["step"],
    )


def local_slot(slot: Slot) -> Slot:
    """This rank's part."""
    return Slot(*(None if array is None else local(array) for array in slot))  # type: ignore[arg-type]


@final
class Members:
    """Parameters that have a gradient."""

    __slots__ = ("_grads", "_rests", "addresses", "changes", "memo", "parameters", "states")

    def __init__(
        self,
        parameters: list[Tensor],
        states: list[State],
        rests: list[Slot] | None,
        memo: dict[str, Any],
        addresses: "array[int]",
        grads: list[Tensor] | None,
        changes: int | None = None,
    ) -> None:
        self.parameters, self.states = parameters, states
        self._rests = rests
        self.memo = memo
        """What a path remembers of them, for as long as they are fit."""
        self.addresses = addresses
        """Of the gradients; another array where any of them has moved."""
        self.changes = changes
        """As `changes_of_moments`, if it is known."""
        self._grads = grads

    @staticmethod
    def of(
        parameters: list[Tensor],
        states: list[State],
        slots: list[Slot],
        one_pass: bool,
        memo: dict[str, Any],
    ) -> "Members":
        """Parameters, their states and slots. Only a path that makes one pass asks for addresses, which
        sharded tensors do not have."""
        grads = [slot.grad for slot in slots]
        addresses = _addresses(grads) if one_pass else _NOWHERE
        # They are remembered, and a gradient must not be kept alive.
        rests = [slot._replace(grad=slot.live) for slot in slots]
        return Members(parameters, states, rests, memo, addresses, grads)

    def rests(self) -> list[Slot]:
        """Their slots, with live in place of the gradient. A path that goes by addresses keeps none, and they
        are made: a state that somebody replaces, to make room, must not be kept alive."""
        if self._rests is not None:
            return self._rests
        pairs = zip(self.parameters, self.states, strict=True)
        return [local_slot(slot_of(parameter, parameter, state)) for parameter, state in pairs]

    @property
    def grads(self) -> list[Tensor]:
        """Of the parameters. A path that takes them by their addresses has no need of Python's tensors, which
        are made for it."""
        return list(map(_grad, self.parameters)) if self._grads is None else self._grads

    def slots(self) -> list[Slot]:
        """One for each."""
        pairs = zip(self.rests(), self.grads, strict=True)
        return [Slot(slot[0], grad, *slot[2:]) for slot, grad in pairs]

    def count_step(self, skip: Tensor | None = None) -> None:
        """Advance the count of each by one; by none where `skip`, on the device, is not 0."""
        if skip is None and "counts" in self.memo:
            self.memo["counts"].advance()
            return
        if "steps" not in self.memo:
            self.memo["steps"] = [slot.step for slot in self.rests()]
        torch._foreach_add_(self.memo["steps"], 1 if skip is None else (skip == 0).to(torch.float64))

    def ages(self) -> Ages:
        """How many steps each has taken."""
        counts: Counts | None = self.memo.get("counts")
        return Ages.of([state["step"].item() for state in self.states]) if counts is None else counts.ages()

    def changes_of_moments(self) -> int | None:
        """A number that grows if anybody changes a second moment; of our own kernels torch does not know.
        None: nobody counts."""
        if self.changes is not None:
            return self.changes
        moments = [local(state["exp_avg_sq"]) for state in self.states]
        return None if any(map(Tensor.is_inference, moments)) else sum(v._version for v in moments)

    def by_device(self) -> "dict[str, Members]":
        """Those on each kind of device."""
        if "places" not in self.memo:
            places: dict[str, list[int]] = {}
            for i, slot in enumerate(self.rests()):
                places.setdefault(slot.live.device.type, []).append(i)
            self.memo["places"] = places
        places = self.memo["places"]
        return {kind: self if len(places) == 1 else self._part(kind, own) for kind, own in places.items()}

    def _part(self, kind: str, places: list[int]) -> "Members":
        def own(column: list[T]) -> list[T]:
            return [column[i] for i in places]

        memo = self.memo.setdefault(kind, {})
        grads, addresses = own(self.grads), array("q", [self.addresses[i] for i in places])
        rests = None if self._rests is None else own(self._rests)
        return Members(own(self.parameters), own(self.states), rests, memo, addresses, grads, self.changes)

    def hold(self) -> object:
        """All that keeps gradients and states in memory: for who goes on by their addresses while somebody
        else may drop them."""
        return self.grads, [list(state.values()) for state in self.states]

    def remembered(self) -> "Members":
        """They without what must not be kept alive: gradients, and by addresses also states."""
        rests = None if self.memo["one pass"] else self._rests
        return Members(self.parameters, self.states, rests, self.memo, self.addresses, None)

    def at_step(self, grads: list[Tensor], addresses: "array[int]") -> "Members":
        """They with gradients, for one step alone."""
        return Members(self.parameters, self.states, self._rests, self.memo, addresses, grads)


@final
class Counts:
    """How many steps each of several parameters has taken, as parts of one tensor on the host."""

    def __init__(self, steps: list[Tensor], quick: bool) -> None:
        """`quick`: by look.cpp, which may have to be built, where it can be."""
        with torch.inference_mode(False):  # else no later step could advance them
            self._together = torch.stack([step.reshape(()) for step in steps])
        # What was loaded may have been counted in another precision.
        quick = quick and self._together.dtype == torch.float64 and look.functions() is not None
        self._count = look.functions().count if quick else None
        self._place = self._together.data_ptr(), len(steps)

    def each(self) -> tuple[Tensor, ...]:
        """Of each parameter, ()."""
        return self._together.unbind()

    def advance(self) -> None:
        """By one."""
        if self._count is not None:
            self._count(*self._place, 1.0)
        else:
            self._together.add_(_ONE)

    def ages(self) -> Ages:
        """As they are now."""
        # Mostly all are the same, which C++ sees in a tenth of the time.
        same = None if self._count is None else self._count(*self._place, 0.0)
        return Ages.of(self._together.tolist()) if same is None else Ages(same, [])


def count_together(states: list[State], slots: list[Slot], quick: bool) -> tuple[list[Slot], Counts]:
    """The slots with counts that are parts of one tensor, which one operation advances, and those; `quick` as
    in `Counts`."""
    counts = Counts([slot.step for slot in slots], quick)
    for state, count in zip(states, counts.each(), strict=True):
        state["step"] = count
    return [slot._replace(step=state["step"]) for slot, state in zip(slots, states, strict=True)], counts


class Fit:
    """A group of parameters that was fit for a step, and all by which to see that it still is."""

    def __init__(
        self, params: list[Tensor], members: Members, states: list[State], settings: tuple[object, ...]
    ) -> None:
        self._params = list(params)
        self._members = members.remembered()
        self._parameters, self._memo = members.parameters, members.memo
        taking_part = set(map(id, members.parameters))
        self._idle = [parameter for parameter in params if id(parameter) not in taking_part]
        self._states = states
        kept = list(_values(states))
        self._are_tensors = [isinstance(value, Tensor) for value in kept]
        arrays = [*self._parameters, *compress(kept, self._are_tensors)]
        # Of what is cut over ranks, all that follows is about this rank's parts.
        self._are_cut = [cut_of(array) is not None for array in arrays]
        self._cuts = list(map(cut_of, self._parameters)) if any(self._are_cut) else []
        self._specs: list[object] = []
        parts = self._parts(self._parameters)
        self._addresses = _addresses(self._all_parts(kept))
        self._grad_addresses = members.addresses or _addresses(members.grads)
        self._looks, self._look_alike = _looks(members.grads), _look_of(members.grads)
        self._own_looks, self._own_alike = _looks(parts), _look_of(parts)
        self._settings = settings
        # The same questions in one call; of what is cut over ranks it knows nothing.
        one_pass: bool = self._memo["one pass"]
        wanted = one_pass and not self._cuts
        wanted = wanted and not any(map(Tensor.is_inference, arrays))  # which have no versions
        functions = look.functions() if wanted else None
        self._look, self._remembered, self._now = None, None, self._grad_addresses[:]
        if functions is not None:
            watched = [key == "exp_avg_sq" for state in states for key in state]
            # None, if there is a tensor that is not plain.
            self._remembered = functions.remember(self._parameters, members.grads, states, kept, watched)
            self._look = None if self._remembered is None else functions.again
        self._kept: list[Any] = [] if self._look is not None else kept
        """What the states held, if C++ does not know it; by one pass, what refers weakly to the tensors."""
        if one_pass:
            self._kept = list(map(ref, compress(self._kept, self._are_tensors)))

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of parameters or gradients."""
        if not self._cuts:
            return tensors
        return list(map(_part if all(self._cuts) else local, tensors))

    def _all_parts(self, kept: list[Any]) -> list[Tensor]:
        """Of parameters and of what the states hold."""
        arrays = [*self._parameters, *compress(kept, self._are_tensors)]
        if not self._cuts:
            return arrays
        return [*map(_part, compress(arrays, self._are_cut)), *compress(arrays, map(not_, self._are_cut))]

    def _are_cut_as_parameters(self, grads: list[Any]) -> bool:
        if not all(map(isinstance, grads, repeat(Tensor))):
            return False
        # FSDP2 says of all gradients of a parameter how they are cut by one object.
        specs = [getattr(grad, "_spec", None) for grad in grads]
        if len(specs) != len(self._specs) or not all(map(is_, specs, self._specs)):
            if list(map(cut_of, grads)) != self._cuts:
                return False
            self._specs = specs
        return True

    @staticmethod
    def can_be(parameters: list[Tensor], states: list[State], slots: list[Slot]) -> bool:
        """Whether there is anything to remember: each parameter once, plain, its gradient lying like it."""
        return len(set(map(id, parameters))) == len(parameters) and all(
            is_plain(local(parameter.data))
            and is_plain(slot.grad)
            and not parameter.is_complex()
            and not parameter.is_meta
            and slot.grad.stride() == slot.live.stride()
            and "unseeded" not in state
            for parameter, state, slot in zip(parameters, states, slots, strict=True)
        )

    def again(self, params: list[Tensor], settings: tuple[object, ...]) -> Members | None:
        """The members with their new gradients; None if anything is not as it was."""
        if settings != self._settings:
            return None
        members = self._members
        if self._look is not None:
            members.changes = self._changes_at_a_look(params)
            if members.changes is None:
                return None
            members.addresses = self._grad_addresses
            return members
        grads = self._grads_again(params)
        if grads is None:
            return None
        return members.at_step(grads, self._grad_addresses)

    def _changes_at_a_look(self, params: list[Tensor]) -> int | None:
        """What `Members.changes` is; None if anything is not as it was. By look.cpp."""
        assert self._look is not None
        lists = params, self._params, self._parameters, self._idle, self._states
        found = self._look(self._remembered, *lists, self._now)
        if found is None:
            return None
        moved, changes = found
        if moved:
            self._grad_addresses = self._now[:]
        return int(changes)

    def _grads_again(self, params: list[Tensor]) -> list[Tensor] | None:
        """The gradients at their addresses; None if anything is not as it was."""
        if len(params) != len(self._params):
            return None
        if not all(map(is_, params, self._params)) or not self._are_where_they_were():
            return None
        grads: list[Any] = list(map(_grad, self._parameters))
        if self._cuts:
            if not self._are_cut_as_parameters(grads):
                return None
            grads = self._parts(grads)
        # What torch guards with also tells modes apart, of which nothing here depends.
        if not self._look_alike(*grads) and _looks(grads) != self._looks:
            return None
        if any(parameter.grad is not None for parameter in self._idle):
            return None
        if not _are_at(grads, self._grad_addresses):
            self._grad_addresses = _addresses(grads)
        if not all(self._grad_addresses) and not all(map(is_plain, grads)):
            return None
        return grads

    @property
    def looks_at_once(self) -> bool:
        """Whether look.cpp does it."""
        return self._look is not None

    def tells(self, settings: tuple[object, ...]) -> bool:
        """Whether a step with these settings can tell what it does, if all else is as it was."""
        return bool(self._memo["tells"]) and settings == self._settings

    def captured(self) -> list[object]:
        """What a graph was captured with."""
        parts = [self._memo, *(part for part in self._memo.values() if isinstance(part, dict))]
        return [kept for part in parts for kept in part.get("captured", ())]

    def _are_where_they_were(self) -> bool:
        kept = list(_values(self._states))
        if len(kept) != len(self._are_tensors):
            return False
        tensors = list(compress(kept, self._are_tensors))
        same = (
            map(is_, tensors, map(call, self._kept)) if self._memo["one pass"] else map(is_, kept, self._kept)
        )
        if type(None) in set(map(type, tensors)) or not all(same):  # what refers to nothing gives None too
            return False
        # Also the same tensor may have been given other memory, on another device, or another order of it.
        parts = self._parts(self._parameters)
        if not self._own_alike(*parts) and _looks(parts) != self._own_looks:
            return False
        return _are_at(self._all_parts(kept), self._addresses)


class Fits:
    """Those of an optimizer, a group each."""

    def __init__(self) -> None:
        self._groups: dict[int, Fit] = {}
        self._states: list[State] = []
        self._same: Callable[[Any, list[State], int], int] = _version_of
        self._version = 0
        self._captured: list[object] = []

    def __len__(self) -> int:
        return len(self._groups)

    def clear(self) -> None:
        """Forget all, and the tensors that it keeps."""
        for number in list(self._groups):
            self._forget(number)
        self._states.clear()

    def look(self, states: States) -> None:
        """Forget all, if a parameter has another state than it had."""
        self._version = self._same(states, self._states, self._version)
        if self._version == -1:
            self.clear()

    def again(self, number: int, params: list[Tensor], settings: tuple[object, ...]) -> Members | None:
        """As `Fit.again`, for group `number`, which is forgotten if it is not as it was."""
        fit = self._groups.get(number)
        members = None if fit is None else fit.again(params, settings)
        if members is None:
            self._forget(number)  # before there is anything new: it keeps memory
        return members

    def tell(self, number: int, settings: tuple[object, ...]) -> bool:
        """As `Fit.tells`, for group `number`; False if nothing is known of it."""
        fit = self._groups.get(number)
        return fit is not None and fit.tells(settings)

    def _forget(self, number: int) -> None:
        fit = self._groups.pop(number, None)
        if fit is not None:
            # A captured graph, of whose end nobody tells us, goes on to read what it was captured with.
            self._captured += fit.captured()

    def keep(self, number: int, fit: Fit, states: States) -> None:
        """Remember a group as it is now."""
        self._states = list(states.values())
        self._groups[number] = fit
        # Of others than Python's own dictionaries C++ knows nothing.
        quick = fit.looks_at_once and type(states) in (dict, defaultdict)
        self._same = look.functions().same if quick else _version_of
        self._version = 0


_address, _grad = Tensor.data_ptr, attrgetter("grad")
_NOWHERE = array("q")  # made here, as a compiler knows of no arrays
_part = attrgetter("_local_tensor")  # as `local`, where it is known to be cut
# In torch for CUDA only, and not for users; where it is missing, Python does the same in five times the time.
_data_ptrs_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


@lru_cache(maxsize=64)
def _indices(count: int) -> list[int]:
    return list(range(count))


def _addresses(tensors: list[Tensor]) -> "array[int]":
    return array("q", map(_address, tensors))


def _are_at(tensors: list[Tensor], addresses: "array[int]") -> bool:
    if _data_ptrs_equal is not None:
        return bool(_data_ptrs_equal(tensors, addresses.tolist(), _indices(len(tensors))))
    return _addresses(tensors) == addresses


def _version_of(states: States, before: list[State], version: int) -> int:
    """-1, unless the states are those; otherwise what tells them from others, 0 where nothing does."""
    return 0 if len(states) == len(before) and all(map(is_, states.values(), before)) else -1


def _values(states: list[State]) -> Iterable[Tensor]:
    return chain.from_iterable(map(dict.values, states))


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements are what lies at its address: no wrapper, no negative view, no unwritten zeros."""
    known = type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
    return known and not tensor.is_neg() and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def _looks(grads: list[Any]) -> list[object]:
    """What gradients are and how they lie, which is how their parameters do. None, which is no gradient, is
    unlike any."""
    return [
        grad
        if not isinstance(grad, Tensor) or grad.layout != torch.strided
        else (type(grad), grad.dtype, grad.device, grad.shape, grad.stride(), grad.is_neg())
        for grad in grads
    ]


def _look_of(grads: list[Tensor]) -> Callable[..., bool]:
    """Whether the looks of gradients are those of these: False may be wrong, in another mode; True is not."""
    # What torch.compile guards its graphs with: one call for all of them.
    guards = TensorGuards(*grads, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check
