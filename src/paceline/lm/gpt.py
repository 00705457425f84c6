"""A small GPT with GPT-2's architecture, from 0.3 to 124 million parameters."""

import math
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.lm.documents import needed_for
from paceline.lm.shapes import GPTShape as GPTShape
from paceline.lm.shapes import shape_of as shape_of

# --- The model ------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)  # queries, keys, values
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        x = x + self._dropped(self._attend(self.attention_norm(x), allowed))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        return x + self._dropped(self.mlp_out(hidden))

    def _attend(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.transpose(1, 3).unbind(2)  # each (batch, heads, length, width / heads)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=allowed, dropout_p=dropout, is_causal=allowed is None
        )
        return self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


@final
class GPT(nn.Module):
    """GPT-2: learned positions, normalisation before each part, tanh GELU, biases, tied embedding.

    The weights come from torch's generator: `torch.manual_seed` decides them.

    Arguments:
        shape: the sizes; `shape_of` returns those of a name.
        activation_checkpointing: keep only the input of each block for the backward pass, and recompute the
            rest, to save memory.

    >>> _ = torch.manual_seed(0)
    >>> model = GPT(shape_of("gpt:0.3m", vocabulary=100, length=16))
    >>> model(torch.arange(32).view(2, 16)).shape
    torch.Size([2, 16, 100])
    """

    _unused: Tensor | None

    def __init__(self, shape: GPTShape, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.shape, self.activation_checkpointing = shape, activation_checkpointing
        with torch.device("meta"):  # skips torch's own initialisation, its time and random numbers
            self.tokens = nn.Embedding(shape.rows, shape.width)
            self.positions = nn.Embedding(shape.length, shape.width)
            self.blocks = nn.ModuleList([_Block(shape) for _ in range(shape.layers)])
            self.last_norm = nn.LayerNorm(shape.width)
        self.to_empty(device=torch.get_default_device())
        self._initialise_()
        # Slicing the logits instead would cost a GPU 4 % of a step.
        unused = torch.zeros(shape.rows)
        unused[shape.vocabulary :] = -math.inf
        self.register_buffer("_unused", unused if shape.rows > shape.vocabulary else None, persistent=False)

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: token ids must be below it."""
        return self.shape.vocabulary

    @torch.no_grad()
    def _initialise_(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                # The residual stream is a sum of this many terms; its variance must not grow with them.
                additions = 2 * self.shape.layers if name.endswith("_out.weight") else 1
                parameter[: self.vocabulary if parameter is self.tokens.weight else None].normal_(
                    std=0.02 / math.sqrt(additions)
                )
        self.tokens.weight[self.vocabulary :] = 0.0

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at every place: (batch, length, rows of the embedding).

        Arguments:
            tokens: (batch, length).
            positions: (batch, length), the place of each token in its own example. An example begins
                wherever it is 0, and does not attend to others. None: each row is one example.
        """
        length = tokens.shape[1]
        if length > self.shape.length:
            raise ValueError(f"a sequence of {length} tokens; this GPT has {self.shape.length} positions")
        # The gradient of a slice is a sum; that of an embedding would be a slower scatter.
        places = self.positions.weight[:length] if positions is None else self.positions(positions)
        x = self.tokens(tokens) + places
        if self.shape.dropout:
            x = F.dropout(x, self.shape.dropout, self.training)
        allowed = None if positions is None else _own_example(positions)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, allowed, use_reentrant=False)
            else:
                x = block(x, allowed)
        return F.linear(self.last_norm(x), self.tokens.weight, self._unused)


def _own_example(positions: Tensor) -> Tensor:
    """Return the attention mask (batch, 1, length, length): each token sees its own example up to itself.

    >>> _own_example(torch.tensor([[0, 1, 0]]))[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    examples = (positions == 0).cumsum(-1)
    return (examples[:, None, :, None] == examples[:, None, None, :]).tril()


# --- To transformers --------------------------------------------------------------------------------

_NAMES = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "last_norm": "transformer.ln_f",
    "attention_norm": "ln_1",
    "attention_in": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
_SHAPE_NAMES = {
    "vocab_size": "vocabulary",
    "n_positions": "length",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
    "resid_pdrop": "dropout",
}


def _pairs(ours: GPT, theirs: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of our weights and views of GPT2LMHeadModel's, transposed and cut to one shape."""
    weights = dict(theirs.named_parameters())
    pairs = []
    for name, weight in ours.named_parameters():
        *block, part, kind = name.split(".")
        where = "".join(f"transformer.h.{number}." for number in block[1:])
        other = weights[f"{where}{_NAMES[part]}.{kind}"]
        is_linear = kind == "weight" and part.endswith(("_in", "_out"))
        pairs.append((weight[: len(other)] if part == "tokens" else weight, other.T if is_linear else other))
    return pairs


@torch.no_grad()
def to_transformers(model: GPT) -> Any:
    """Return a copy as transformers' GPT2LMHeadModel, with equal logits."""
    with needed_for("exporting a model"):
        from transformers import GPT2Config, GPT2LMHeadModel
    fields: dict[str, Any] = {theirs: getattr(model.shape, ours) for theirs, ours in _SHAPE_NAMES.items()}
    fields |= dict.fromkeys(("embd_pdrop", "attn_pdrop"), model.shape.dropout)
    # The tokenizer knows which tokens begin and end a text; GPT-2's own may be beyond the vocabulary.
    config = GPT2Config(**fields, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):  # an export must not change the run's random numbers
        copy: Any = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    for ours, theirs in _pairs(model, copy):
        theirs.copy_(ours)
    return copy.eval()
