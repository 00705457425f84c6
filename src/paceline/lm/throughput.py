"""The share of a GPU's peak speed that a run uses."""

import torch
from torch import nn

from paceline.lm.gpt import GPT
from paceline.lm.pretrained import Pretrained
from paceline.lm.shapes import PEAK, operations_of


def peak_of(device: torch.device) -> float | None:
    """Return the peak operations per second of a device; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK.items() if known in name), None)


def operations_per_token(model: nn.Module, length: int) -> float:
    """Return the operations per token of a model, forward and backward.

    Embeddings do not count, unless they are also the last layer.

    >>> from paceline.lm.gpt import shape_of
    >>> model = GPT(shape_of("gpt:0.3m", vocabulary=100, length=16))
    >>> shape = model.shape
    >>> seen = 12 * shape.layers * shape.width * 16
    >>> operations_per_token(model, 16) == 6 * (shape.parameters - 16 * shape.width) + seen
    True
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    match model:
        case GPT():
            shape = model.shape
            return operations_of(parameters - shape.length * shape.width, shape.layers, shape.width, length)
        case Pretrained():
            config = model.whole.config.get_text_config()
            width, layers = int(config.hidden_size), int(config.num_hidden_layers)
            untied = 0 if config.tie_word_embeddings else model.vocabulary * width
            return operations_of(parameters - untied, layers, width, length)
    return 6.0 * parameters
