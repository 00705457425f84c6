"""How large a GPT is, and what a token costs to train on. Imports no torch: it answers at once."""

import difflib
import re
from dataclasses import dataclass
from typing import final

# --- Shapes ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    """How large a GPT is."""

    vocabulary: int
    """Token ids are below it; so many logits come out."""
    length: int
    """Most tokens of a sequence: learned positions."""
    width: int
    """Numbers that stand for a token inside."""
    layers: int
    heads: int
    dropout: float = 0.0
    vocabulary_multiple: int = 1
    """The embedding has rows up to the next multiple, because GPUs multiply odd sizes slowly. The rows too
    many are parameters, are zero in the beginning, and never get a gradient: their logits are -inf."""
    bias: bool = True
    """Whether norms and linear layers add a bias, as GPT-2's do."""

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
        """Rows of the embedding."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def parameters(self) -> int:
        """All of them; the embedding, which is also the last layer, counts once.

        >>> shape_of("gpt2", 50257, 1024).parameters
        124439808
        """
        block = 12 * self.width**2 + (13 if self.bias else 2) * self.width
        last = (2 if self.bias else 1) * self.width
        return (self.rows + self.length) * self.width + self.layers * block + last


# Width, layers, heads. The number in a name is that of all parameters, embedding and positions included,
# with a vocabulary of 4,096 and 256 positions, to within a fifth.
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
    """The shape of a named size: gpt:0.3m, gpt:1m, …, gpt:88m, or gpt2.

    The number counts all parameters at a vocabulary of 4,096 and 256 positions. "gpt2" is GPT-2 as it was
    published: its vocabulary of 50,257, its 1,024 positions, however few of them `length` uses.

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


# --- Operations -----------------------------------------------------------------------------------

# Dense matrix products in bfloat16, floating-point operations a second, as their makers state.
PEAK = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}


def operations_of(weights: int, layers: int, width: int, length: int) -> float:
    """Of one token, forward and backward: 6 for every weight that multiplies, and attention over the length.

    Attention counts 12 · layers · width · length, as in the PaLM paper, masked half included.

    >>> operations_of(124_439_808 - 1024 * 768, layers=12, width=768, length=1024)
    855166464.0
    """
    return 6.0 * weights + 12.0 * layers * width * length
