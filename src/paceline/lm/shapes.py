"""The sizes of a GPT. Imports no torch, to be quick."""

import difflib
import re
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    """The sizes of a GPT."""

    vocabulary: int
    """The number of token ids."""
    length: int
    """The longest sequence, in tokens: the number of learned positions."""
    width: int
    """The length of a token's vector."""
    layers: int
    heads: int
    dropout: float = 0.0
    vocabulary_multiple: int = 1
    """The rows of the embedding are rounded up to a multiple of this, because GPUs multiply odd sizes slowly.
    The extra rows are parameters that begin at 0 and never get a gradient: their logits are -inf."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "width", "layers", "heads", "vocabulary_multiple"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Invalid {name}: {value!r}; allowed: an integer >= 1")
        if self.width % self.heads:
            raise ValueError(f"Invalid heads: {self.heads}; allowed: divisors of the width {self.width}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Invalid dropout: {self.dropout!r}; allowed: 0 <= dropout < 1")

    @property
    def rows(self) -> int:
        """The number of rows of the embedding."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def parameters(self) -> int:
        """The number of all parameters. The embedding, which is also the last layer, counts once.

        >>> shape_of("gpt2", 50257, 1024).parameters
        124439808
        """
        block = 12 * self.width**2 + 13 * self.width
        return (self.rows + self.length + 2) * self.width + self.layers * block


# Width, layers, heads. The number in a name is that of all parameters, to within a fifth, with a vocabulary
# of 4,096 and 256 positions.
_SIZES = {
    "gpt:0.3m": (48, 4, 3),
    "gpt:1m": (128, 3, 4),
    "gpt:3m": (192, 5, 6),
    "gpt:7m": (256, 8, 4),
    "gpt:12m": (384, 6, 6),
    "gpt:25m": (512, 7, 8),
    "gpt:50m": (576, 12, 9),
    "gpt:88m": (768, 12, 12),  # GPT-2's blocks
}
_GPT2 = GPTShape(vocabulary=50257, length=1024, width=768, layers=12, heads=12)


def shape_of(name: str, vocabulary: int, length: int) -> GPTShape:
    """Return the shape of a named size: gpt:0.3m, gpt:1m, …, gpt:88m, or gpt2.

    The number counts all parameters at a vocabulary of 4,096 and 256 positions. "gpt2" is the published
    GPT-2, with a vocabulary of 50,257; it has 1,024 positions even if `length` is smaller.

    >>> shape_of("gpt:1m", 4096, 256).parameters
    1152128
    """
    if name == "gpt2":
        if vocabulary != _GPT2.vocabulary or not 1 <= length <= _GPT2.length:
            raise ValueError(
                f"gpt2 has a vocabulary of {_GPT2.vocabulary:,} and at most {_GPT2.length:,} tokens, not "
                f"{vocabulary:,} and {length:,}; gpt:88m is the same with any vocabulary and length"
            )
        return _GPT2
    if name not in _SIZES:
        raise ValueError(
            f"unknown model {name!r}; did you mean {_nearest(name)}? Allowed: {', '.join(_SIZES)}, gpt2"
        )
    width, layers, heads = _SIZES[name]
    return GPTShape(vocabulary=vocabulary, length=length, width=width, layers=layers, heads=heads)


def _nearest(name: str) -> str:
    asked = re.fullmatch(r"gpt[:-]?(\d*\.?\d+)m", name, re.IGNORECASE)
    if asked:
        return min(_SIZES, key=lambda known: abs(float(known[4:-1]) - float(asked[1])))
    return difflib.get_close_matches(name, [*_SIZES, "gpt2"], n=1, cutoff=0.0)[0]
