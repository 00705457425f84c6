"""Parameter groups of a model: parameters with weight decay, and parameters without."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from paceline.optim.export import renamer
from paceline.optim.settings import is_number, require

# _NormBase is every BatchNorm, SyncBatchNorm and InstanceNorm.
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_NORM_NAME = re.compile(r"Norm([123]d)?$")


def parameter_groups(model: nn.Module, weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Return a model's parameters as optimizer groups in which norms and biases do not decay.

    A parameter does not decay if any of these holds; all others do, embeddings among them:

    - it has fewer than two dimensions;
    - it belongs to a norm: one of torch's, or a module whose class name ends in Norm, Norm1d, 2d or 3d;
    - the last part of its name has the word bias, as in `gate_proj_bias` or `bias_k`.

    Every parameter appears once, tied ones under their first name. Frozen ones appear too, so that they are
    trained if they are unfrozen later. Until then neither PACE nor AdamW uses memory for them. Groups include
    names, in the model's order, without the prefixes of `torch.compile` and DistributedDataParallel. Empty
    groups are left out. FSDP1 and ZeRO-3 flatten parameters and hide their dimensions; FSDP2 does not.

    Arguments:
        model: any module.
        weight_decay: the weight decay of the parameters that decay. None: that of the optimizer.

    Returns:
        Up to two groups for a torch optimizer: decaying, not decaying.

    >>> import torch, paceline
    >>> from paceline.groups import parameter_groups
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 9))
    >>> optimizer = paceline.PACE(parameter_groups(model, weight_decay=0.1), lr=3e-4)
    >>> for group in optimizer.param_groups:
    ...     print(group["weight_decay"], group["param_names"])
    0.1 ['0.weight', '2.weight']
    0.0 ['1.weight', '1.bias', '2.bias']
    """
    _check(model, weight_decay)
    decaying = {} if weight_decay is None else {"weight_decay": float(weight_decay)}
    weights: dict[str, Any] = {"params": [], **decaying}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0}

    norms = set(_owned(model, _is_norm))
    rename = renamer(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter '{name}' has no shape yet; run the model once before grouping")
        is_plain = parameter.ndim < 2 or parameter in norms or _is_bias(name)
        group = plain if is_plain else weights
        group["params"].append((rename(name), parameter))
    return [group for group in (weights, plain) if group["params"]]


def _check(model: nn.Module, weight_decay: float | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"parameter_groups needs a torch.nn.Module, with its layers; got {model!r:.80}")
    if weight_decay is not None:
        ok = is_number(weight_decay) and 0.0 <= weight_decay < math.inf
        require(ok, "weight_decay", weight_decay, "None, or >= 0 and finite")


def _owned(model: nn.Module, is_kind: Callable[[nn.Module], bool]) -> Iterator[Tensor]:
    """Yield the parameters of modules of one kind, without those of their children."""
    for module in model.modules():
        if is_kind(module):
            yield from module.parameters(recurse=False)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or _NORM_NAME.search(type(module).__name__) is not None


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2].split("_")
