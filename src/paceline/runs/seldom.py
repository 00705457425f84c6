"""An average that takes in the weights of every n-th step only, as the paper's EMAs with uf > 1 do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from paceline.optim.averages import Average, Parts
from paceline.optim.settings import require


@final
@dataclass(frozen=True)
class Seldom:
    """An average that moves at the steps whose number is a multiple of `every`, at the rate of that step."""

    average: Average
    every: int

    def __post_init__(self) -> None:
        whole = isinstance(self.every, int) and not isinstance(self.every, bool)
        require(whole and self.every >= 1, "every", self.every, "an integer >= 1")

    @property
    def parts(self) -> tuple[str, ...]:
        return self.average.parts

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        if t % self.every == 0:
            self.average.move_(parts, lives, t)

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        return self.average.returned(parts, live)
