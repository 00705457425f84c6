"""Causal language models of transformers: load them from the hub or a folder, and export them.

Weights are read from safetensors, never from a pickle, and code that comes with a model is never run.
"""

import re
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from paceline.lm.documents import needed_for
from paceline.lm.evaluate import evaluating
from paceline.lm.files import naming, new_folder, remove_temporary
from paceline.lm.gpt import GPT, to_transformers
from paceline.lm.vocabulary import Vocabulary

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@final
class Pretrained(nn.Module):
    """A causal language model of transformers, with the arguments and results of `GPT`.

    Parameters and state dict keep their names in transformers.
    """

    whole: Any
    """The model of transformers."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        # As a submodule it would add a prefix to all names. So both modules share their tables of
        # parameters, buffers and submodules: a change in one, such as a move or a cast, is one in both.
        self.__dict__["whole"] = whole
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[table] = whole.__dict__[table]
        self.training = whole.training

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: token ids must be below it."""
        return int(self.whole.get_input_embeddings().num_embeddings)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, as torch's `Module.train` does."""
        self.whole.training = mode
        return super().train(mode)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at every place.

        Without attention mask and cache, transformers begins a new example where positions do not increase
        by 1. `separates_examples` returns whether a model supports that.
        """
        given = {} if positions is None else {"position_ids": positions}
        return self.whole(input_ids=tokens, use_cache=False, **given).logits  # type: ignore[no-any-return]


# --- Loading --------------------------------------------------------------------------------------


def load_pretrained(name: str | Path, *, activation_checkpointing: bool = False) -> tuple[Pretrained, Any]:
    """Load a model in float32, in evaluation mode, and its tokenizer.

    Arguments:
        name: a folder with config, safetensors and tokenizer, which needs no network; or a name of the
            Hugging Face hub, owner/model.
        activation_checkpointing: keep only the input of each layer for the backward pass, and recompute the
            rest, to save memory.
    """
    with needed_for("a pretrained model"):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    path = Path(name).expanduser()
    is_here = path.is_dir()
    if is_here:
        _check_complete(path)
    elif not _HUB_NAME.fullmatch(str(name)):
        raise FileNotFoundError(f"no model {name}: no such folder, and not a name of the hub")
    source = str(path if is_here else name)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Without trust_remote_code=False, transformers would ask on the terminal.
    options: dict[str, Any] = {"local_files_only": is_here, "trust_remote_code": False}
    try:
        _refuse_unsafe(source, is_here)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="sdpa",  # of others, transformers may fetch the code from the hub
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except OSError as error:
        reason = str(error).partition(". ")[0]
        raise FileNotFoundError(f"cannot load {name}: {reason}") from error
    model, found = loaded
    if found["missing_keys"]:
        raise ValueError(f"{name} has no weights for {', '.join(sorted(found['missing_keys']))}")
    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Pretrained(model.eval()), tokenizer


def load_tokenizer(folder: Path) -> Any:
    """Load a tokenizer of transformers from a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _check_complete(folder: Path) -> None:
    for needed in ("config.json", "*.safetensors"):
        if not any(folder.glob(needed)):
            raise FileNotFoundError(
                f"{folder} holds no {needed}; weights in other files may be pickles, which can run code"
            )


def _refuse_unsafe(source: str, is_here: bool) -> None:
    """Raise ValueError for a model with its own code or quantized weights; read only its settings."""
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    config, _ = PretrainedConfig.get_config_dict(source, local_files_only=is_here)
    for settings in (config, get_tokenizer_config(source, local_files_only=is_here)):
        if "auto_map" in settings:
            code = settings["auto_map"]
            raise ValueError(f"{source} comes with code of its own, which is never run: auto_map {code}")
    if "quantization_config" in config:
        raise ValueError(f"{source} holds quantized weights, which cannot be trained; take its original")


# --- Packed examples --------------------------------------------------------------------------------


def separates_examples(module: nn.Module, vocabulary: int) -> bool:
    """Return whether a model keeps packed examples of one row apart, by a test on a few tokens.

    Different tokens in the first example must not change the logits of the second, nor those of the next
    row. Many models of transformers accept positions and ignore them, without an error. Among them are
    recurrent ones (Mamba, RWKV, Qwen3-Next in part), those with ALiBi (Bloom, MPT), OPT and Falcon.
    """
    device = next(module.parameters()).device
    first = 3
    tokens = (7 * torch.arange(4 * first, device=device).view(2, -1) + 3) % vocabulary
    positions = torch.arange(2 * first, device=device) % torch.tensor([[first], [2 * first]], device=device)
    other = tokens.clone()
    other[0, :first] = (other[0, :first] + 1) % vocabulary
    with evaluating(module):
        logits = (module(given, positions)[..., :vocabulary] for given in (tokens, other))
        moved = (next(logits) - next(logits)).abs().flatten(0, 1)
    # Masked tokens add exactly 0. Even in a small untrained model a leak is 1e-3 of the change.
    return bool(moved[first:].max() <= 1e-5 * moved[:first].max())


# --- Exporting --------------------------------------------------------------------------------------


def export_folder(module: nn.Module, tokenizer: Any, folder: str | Path) -> Path:
    """Write config, tokenizer and the current weights to a folder, which transformers loads. Return it.

    The folder appears when it is complete. What a killed export to it has left is removed.

    Arguments:
        module: a `GPT` or a `Pretrained`.
        tokenizer: a `Vocabulary`, or a tokenizer of transformers.
        folder: must be new or empty.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; choose another folder")
    if not isinstance(module, GPT | Pretrained):
        raise TypeError(f"only a GPT or a Pretrained can be exported, not {type(module).__name__}")
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    whole = to_transformers(module) if isinstance(module, GPT) else module.whole
    remove_temporary(folder.parent, folder.name)
    with new_folder(folder) as made, naming(folder):
        if isinstance(tokenizer, Vocabulary):
            tokenizer.save(made)
            for config in (whole.config, whole.generation_config):
                config.bos_token_id = config.eos_token_id = tokenizer.end_of_text
        else:
            tokenizer.save_pretrained(made)
        whole.save_pretrained(made)
    return folder
