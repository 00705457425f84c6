"""How large a model is: the tensors it has, and which of them multiply."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, final

from paceline.experiments.config import ConfigError, nearest, parse_spec
from paceline.lm.shapes import GPTShape, operations_of, shape_of


class Tensor(NamedTuple):
    """A parameter that the model has so many times; a vector has one column."""

    rows: int
    columns: int
    times: int
    multiplies: bool
    """Whether its elements take part in a matrix product for every token."""
    in_layer: bool

    @property
    def elements(self) -> int:
        """Of one of them."""
        return self.rows * self.columns


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder: GPT-2's kind (biases, GELU, learned positions) or Llama's (gated, RMSNorm, grouped keys)."""

    kind: Literal["gpt", "llama"] = "llama"
    vocabulary: int
    """Rows of the embedding, and logits."""
    width: int
    layers: int
    heads: int
    keys: int
    """Heads of keys and values; as many as `heads`, or fewer that are shared."""
    inner: int
    """Width inside the MLP."""
    length: int
    """Tokens of a sequence."""
    tied: bool = False
    """Whether the embedding is also the last layer."""
    positions: int = 0
    """Learned ones."""
    bias: bool = False
    head: int | None = None
    """Width of a head; none: the heads share the model's width."""
    norms: int = 2
    """Norms of a layer, of the model's width."""
    head_norms: bool = False
    """Whether queries and keys have norms of a head's width, too."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "keys", "inner", "length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: at least 1")
        if (self.head is None and self.width % self.heads) or self.heads % self.keys:
            raise ConfigError(
                f"heads {self.heads}, keys {self.keys} and width {self.width} do not fit: heads divide the "
                "width, and keys the heads"
            )

    @property
    def query_width(self) -> int:
        """Numbers of all queries of a token."""
        return self.head_width * self.heads

    @property
    def key_width(self) -> int:
        """Numbers of all keys of a token."""
        return self.head_width * self.keys

    @property
    def head_width(self) -> int:
        """Numbers of one head."""
        return self.head or self.width // self.heads

    def products(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of the matrix products of a layer."""
        w, q, k, i = self.width, self.query_width, self.key_width, self.inner
        if self.kind == "gpt":
            return ((3 * w, w), (w, w), (i, w), (w, i))
        return ((q, w), (k, w), (k, w), (w, q), (i, w), (i, w), (w, i))

    def tensors(self) -> Iterator[Tensor]:
        """All parameters."""
        width, layers = self.width, self.layers
        yield Tensor(self.vocabulary, width, 1, self.tied, False)
        if not self.tied:
            yield Tensor(self.vocabulary, width, 1, True, False)
        if self.positions:
            yield Tensor(self.positions, width, 1, False, False)
        for out, into in self.products():
            yield Tensor(out, into, layers, True, True)
            if self.bias:
                yield Tensor(out, 1, layers, True, True)
        norm = 2 if self.bias else 1
        yield Tensor(width, 1, self.norms * norm * layers, True, True)
        if self.head_norms:
            yield Tensor(self.head_width, 1, 2 * layers, True, True)
        yield Tensor(width, 1, norm, True, False)

    @property
    def parameters(self) -> int:
        """All of them.

        >>> SHAPES["8b"].parameters
        8030261248
        """
        return sum(tensor.elements * tensor.times for tensor in self.tensors())

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        return sum(t.elements * t.times for t in self.tensors() if t.in_layer) // self.layers

    @property
    def multiplying(self) -> int:
        """Parameters that a token is multiplied with: not an embedding that is only looked up."""
        return sum(tensor.elements * tensor.times for tensor in self.tensors() if tensor.multiplies)

    @property
    def operations_per_token(self) -> float:
        """Forward and backward, without what activation checkpointing does again."""
        return operations_of(self.multiplying, self.layers, self.query_width, self.length)


def _llama(width: int, layers: int, heads: int, keys: int, inner: int, **more: Any) -> Shape:
    usual: dict[str, Any] = {"vocabulary": 128256, "length": 8192}
    return Shape(width=width, layers=layers, heads=heads, keys=keys, inner=inner, **{**usual, **more})


SHAPES: dict[str, Shape] = {
    "1b": _llama(2048, 16, 32, 8, 8192, tied=True),
    "8b": _llama(4096, 32, 32, 8, 14336),
    "13b": _llama(5120, 40, 40, 40, 13824, vocabulary=32000, length=4096),
    "70b": _llama(8192, 80, 64, 8, 28672),
    "405b": _llama(16384, 126, 128, 8, 53248),
}
"""Llama 3.2 1B, Llama 3.1 8B, Llama 2 13B, Llama 3.1 70B and 405B."""

_SMOL = _llama(576, 30, 9, 3, 1536, vocabulary=49152, tied=True)
HUB: dict[str, Shape] = {
    "HuggingFaceTB/SmolLM2-135M": _SMOL,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOL,
    "HuggingFaceTB/SmolLM2-1.7B": _llama(2048, 24, 32, 32, 8192, vocabulary=49152, tied=True),
    "Qwen/Qwen3-1.7B": _llama(2048, 28, 16, 8, 6144, vocabulary=151936, tied=True, head=128, head_norms=True),
    # Five of six layers look back 512 tokens only; here all of them look at everything.
    "google/gemma-3-1b-pt": _llama(
        1152, 26, 4, 1, 6912, vocabulary=262144, tied=True, head=256, norms=4, head_norms=True
    ),
}
"""Models that the paper fine-tunes, or we do, by their names on the hub, from their public configs."""


def _spelled(name: str) -> Shape:
    _, positional, settings = parse_spec(name)
    known = ["width", "layers", "heads", "keys", "inner", "vocabulary", "length", "tied"]
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(
                f"llama has no setting {key!r}{nearest(key, known)}; there are: {', '.join(known)}"
            )
        if not isinstance(value, bool if key == "tied" else int):
            raise ConfigError(
                f"llama: {key} is {value!r}; allowed: {'true or false' if key == 'tied' else 'a number'}"
            )
    missing = [key for key in known[:5] if key not in settings]
    if positional or missing:
        raise ConfigError(
            f"{name[:80]!r} lacks {', '.join(missing) or 'names of its numbers'}; write llama:width=4096,…"
        )
    return _llama(**settings)


def of_gpt(shape: GPTShape, length: int | None = None) -> Shape:
    """A GPT of ours."""
    return Shape(
        kind="gpt",
        vocabulary=shape.rows,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        keys=shape.heads,
        inner=4 * shape.width,
        length=length or shape.length,
        tied=True,
        positions=shape.length,
        bias=shape.bias,
    )


def named(name: str, *, length: int | None = None, vocabulary: int | None = None) -> Shape:
    """The shape of a preset, of a model of the hub that is known, of gpt2, of a GPT of ours (gpt:7m), or of a
    Llama that is spelled out.

    GPTs have their embedding padded as `paceline train` pads it.

    >>> named("gpt2").parameters, named("gpt:7m", vocabulary=4096, length=256).parameters
    (124475904, 7432704)
    >>> named("HuggingFaceTB/SmolLM2-135M").parameters, named("google/gemma-3-1b-pt").parameters
    (134515008, 999885952)
    >>> named("llama:width=2048,layers=24,heads=16,keys=16,inner=8192,vocabulary=49152,tied=true").parameters
    1711376384
    """
    presets = SHAPES | HUB
    if name in presets or name.startswith("llama:"):
        shape = presets[name] if name in presets else _spelled(name)
        return replace(shape, length=length or shape.length, vocabulary=vocabulary or shape.vocabulary)
    if name == "gpt2" or name.startswith("gpt:"):
        usual = (50257, 1024) if name == "gpt2" else (4096, 256)
        try:
            own = shape_of(name, vocabulary or usual[0], length or usual[1])
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return of_gpt(replace(own, vocabulary_multiple=64), length or usual[1])
    known = [*SHAPES, *HUB, "gpt2"]
    raise ConfigError(
        f"model {name[:80]!r} is unknown{nearest(name, known)}; "
        f"there are: {', '.join(known)}, gpt:0.3m … gpt:88m, llama:width=…,layers=…"
    )
