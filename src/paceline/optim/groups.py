"""Parameter groups of a model: what decays, what does not, what is pulled."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from paceline.optim.checks import is_number, require
from paceline.optim.weights import renamer

# _NormBase is every BatchNorm, SyncBatchNorm and InstanceNorm.
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_NORM_NAME = re.compile(r"Norm([123]d)?$")


def parameter_groups(
    model: nn.Module, weight_decay: float | None = None, *, pull_embeddings: bool = True
) -> list[dict[str, Any]]:
    """A model's parameters as optimizer groups: norms and biases do not decay.

    A parameter does not decay if any of these holds; all others do, embeddings among them:

    - it has fewer than two dimensions;
    - it belongs to a norm: one of torch's, or a module whose class name ends in Norm, Norm1d, 2d or 3d;
    - the last part of its name has the word bias, as in `gate_proj_bias` or `bias_k`.

    Every parameter appears once, tied ones under their first name, frozen ones too: one that is thawed
    later is then trained, and until then neither PACE nor AdamW spends memory on it. Names go along, in
    the model's order and without the parts that `torch.compile` and DistributedDataParallel add. Groups
    without parameters are left out. FSDP1 and ZeRO-3 flatten parameters and hide their dimensions; FSDP2
    does not.

    Arguments:
        model: any module.
        weight_decay: of the parameters that decay. None: the optimizer's own.
        pull_embeddings: False gives embeddings (`nn.Embedding`, `nn.EmbeddingBag` and what is tied to
            them) a group with `pullback_strength` 0, for `PACE`; AdamW ignores that setting. Rows of
            rare tokens are otherwise held back under gain="paper": their √v̂ is small.

    Returns:
        Up to three groups for a torch optimizer: decaying, embeddings that are not pulled, not decaying.

    >>> import torch, paceline
    >>> from paceline.optim.groups import parameter_groups
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 9))
    >>> optimizer = paceline.PACE(parameter_groups(model, weight_decay=0.1), lr=3e-4)
    >>> for group in optimizer.param_groups:
    ...     print(group["weight_decay"], group["param_names"])
    0.1 ['0.weight', '2.weight']
    0.0 ['1.weight', '1.bias', '2.bias']
    """
    _check(model, weight_decay, pull_embeddings)
    decaying = {} if weight_decay is None else {"weight_decay": float(weight_decay)}
    weights: dict[str, Any] = {"params": [], **decaying}
    unpulled: dict[str, Any] = {"params": [], **decaying, "pullback_strength": 0.0}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0}

    norms = set(_owned(model, _is_norm))
    embeddings = set(_owned(model, _is_embedding))
    rename = renamer(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter '{name}' has no shape yet; run the model once before grouping")
        if not pull_embeddings and parameter in embeddings:
            group = unpulled
        elif parameter.ndim < 2 or parameter in norms or _is_bias(name):
            group = plain
        else:
            group = weights
        group["params"].append((rename(name), parameter))
    return [group for group in (weights, unpulled, plain) if group["params"]]


def _check(model: nn.Module, weight_decay: float | None, pull_embeddings: bool) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"parameter_groups takes a torch.nn.Module, whose layers it looks at; got {model!r:.80}"
        )
    if weight_decay is not None:
        ok = is_number(weight_decay) and 0.0 <= weight_decay < math.inf
        require(ok, "weight_decay value", weight_decay, "None, or >= 0 and finite")
    require(isinstance(pull_embeddings, bool), "pull_embeddings value", pull_embeddings, "True or False")


def _owned(model: nn.Module, is_kind: Callable[[nn.Module], bool]) -> Iterator[Tensor]:
    """The parameters of the modules of one kind themselves, not of their children."""
    for module in model.modules():
        if is_kind(module):
            yield from module.parameters(recurse=False)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or _NORM_NAME.search(type(module).__name__) is not None


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2].split("_")
