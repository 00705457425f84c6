"""Models and budgets: those of the paper, and smaller ones in their place.

Scales differ in model, data and budget alone. Learning rates, strengths, powers, schedules and seeds of a
figure are the same at every scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from paceline.runs.config import ConfigError, nearest


@final
@dataclass(frozen=True, slots=True)
class Model:
    """The model that is trained in place of one of the paper's."""

    short: str
    """Its name in names of runs: the same word, the same settings."""
    parameters: float
    """The approximate number of parameters, for the cost."""
    settings: Mapping[str, Any]
    """Settings of `Run`: model, data, length, batch_size, steps and what belongs to them."""

    @property
    def steps(self) -> int:
        """The steps of a whole run."""
        return int(self.settings["steps"])

    @property
    def budgets(self) -> tuple[int, int, int]:
        """Return 50, 75 and 100 % of the run: the ends of decayed branches.

        >>> PAPER.models["GPT-2-124M"].budgets
        (2375, 3563, 4750)
        """
        return self.steps // 2, -(-3 * self.steps // 4), self.steps


@final
@dataclass(frozen=True, slots=True)
class Scale:
    """The models of one scale, by the paper's models that the figures name."""

    name: str
    models: Mapping[str, Model]


# --- The paper's ----------------------------------------------------------------------------------------

# The paper leaves open how often to evaluate, on how much of the held-out data, and what fits a GPU.
_OPEN: dict[str, Any] = {"precision": "bfloat16", "keep": 1}


def _tuned(
    model: str, batch_size: int, steps: int, parameters: float, *,
    data: str = "HuggingFaceTB/smol-smoltalk", template: str | None = "chatml",
) -> Model:  # fmt: skip
    settings: dict[str, Any] = {"task": "sft", "model": model, "data": (f"hf:{data}",)}
    settings |= {"chat_template": template, "length": 1280, "batch_size": batch_size, "steps": steps}
    settings |= {"micro_batch_size": 8, "held_out_samples": 512}
    settings |= {"evaluate_every": -(-steps // 25), "checkpoint_every": steps // 5}
    return Model(model.partition("/")[2].lower(), parameters, _OPEN | settings)


_QWEN = _tuned("Qwen/Qwen3-1.7B", 256, 1779, 1.7e9, template=None)
_TULU = _tuned("Qwen/Qwen3-1.7B", 256, 1779, 1.7e9, template=None, data="allenai/tulu-3-sft-mixture")
_GPT2: dict[str, Any] = {"model": "gpt2", "tokenizer": "gpt2", "compile": True}
_GPT2 |= {"data": ("hf:HuggingFaceFW/fineweb/sample-10BT",), "length": 1024, "batch_size": 512, "steps": 4750}
_GPT2 |= {"micro_batch_size": 32, "held_out_samples": 1024, "evaluate_every": 95, "checkpoint_every": 950}
PAPER = Scale(
    "paper",
    {
        "SmolLM2-135M": _tuned("HuggingFaceTB/SmolLM2-135M", 128, 889, 135e6),
        "SmolLM2-135M, long": _tuned("HuggingFaceTB/SmolLM2-135M", 128, 3557, 135e6),
        "SmolLM2-1.7B": _tuned("HuggingFaceTB/SmolLM2-1.7B", 256, 1778, 1.7e9),
        "Qwen3-1.7B": _QWEN,
        "Qwen3-1.7B on tulu-3": replace(_TULU, short="qwen3-1.7b-tulu"),
        "Gemma3-1B": _tuned("google/gemma-3-1b-pt", 256, 1779, 1.0e9),
        "GPT-2-124M": Model("gpt2", 124e6, _OPEN | _GPT2),
    },
)

# --- Smaller --------------------------------------------------------------------------------------------


def _smaller(name: str, evaluations: tuple[int, int], tuned: Model, trained: Model) -> Scale:
    """Return a scale of two models: one for all that the paper fine-tunes, one for what it pretrains."""
    models = {}
    for key, row in PAPER.models.items():
        own, count = (tuned, evaluations[0]) if "task" in row.settings else (trained, evaluations[1])
        steps = own.steps * (4 if key.endswith("long") else 1)
        often = {"evaluate_every": max(1, steps // count), "checkpoint_every": max(1, steps // 2)}
        models[key] = replace(own, settings={**own.settings, **often, "steps": steps, "keep": 1})
    return Scale(name, models)


_CHAT: dict[str, Any] = {"task": "sft", "model": "HuggingFaceTB/SmolLM2-135M", "chat_template": "chatml"}
_CHAT |= {"data": ("hf:HuggingFaceTB/smol-smoltalk",), "held_out_samples": 128, "precision": "bfloat16"}
_CHAT |= {"length": 1024, "batch_size": 32, "micro_batch_size": 16, "steps": 300}
_TEXT: dict[str, Any] = {"model": "gpt:7m", "tokenizer": "bpe:4096", "compile": True, "precision": "bfloat16"}
_TEXT |= {"data": ("hf:Salesforce/wikitext/wikitext-103-raw-v1",), "held_out_samples": 768}
_TEXT |= {"length": 256, "batch_size": 64, "steps": 2000}
GPU = _smaller("gpu", (20, 40), Model("smollm2-135m", 135e6, _CHAT), Model("gpt-7m", 7.4e6, _TEXT))

_TINY_CHAT: dict[str, Any] = {"task": "sft", "model": "tiny-chat-model", "data": ("chat.jsonl",)}
_TINY_CHAT |= {"length": 64, "batch_size": 2, "steps": 20, "held_out_samples": 2, "device": "cpu"}
_TINY: dict[str, Any] = {"model": "gpt:0.3m", "data": ("python",), "tokenizer": "bpe:512"}
_TINY |= {"length": 32, "batch_size": 4, "steps": 20, "held_out_samples": 8, "device": "cpu"}
_TINY_CHAT["precision"] = _TINY["precision"] = "float32"
CPU = _smaller("cpu", (5, 5), Model("tiny-chat-model", 0.05e6, _TINY_CHAT), Model("gpt-0.3m", 0.14e6, _TINY))
SCALES = {scale.name: scale for scale in (PAPER, GPU, CPU)}


def located(scale: Scale, places: Mapping[str, Sequence[str]]) -> Scale:
    """Return a scale whose data and models are on this machine. Names of runs stay.

    Places are files or folders by what they are for: text, chat, tulu, those with "_held_out" behind, or the
    name of a model that is fine-tuned.

    >>> here = located(GPU, {"text": ["wiki.jsonl.xz"], "SmolLM2-135M": ["smollm2"]})
    >>> here.models["GPT-2-124M"].settings["data"], here.models["Gemma3-1B"].settings["model"]
    (('wiki.jsonl.xz',), 'smollm2')
    """
    known, placed = dict[str, None](), {}
    for key, row in scale.models.items():
        model, data = str(row.settings["model"]), row.settings["data"]
        name = model.rpartition("/")[2] if row.settings.get("task") == "sft" else ""
        # By the data: at smaller scales the run on tulu is the one on the other data.
        kind = "text" if not name else "tulu" if "tulu" in data[0] else "chat"
        known |= dict.fromkeys(filter(None, (kind, f"{kind}_held_out", name)))
        own = {"data": tuple(places.get(kind, data)), "model": places.get(name, [model])[0]}
        own |= {"held_out": tuple(places.get(f"{kind}_held_out", ()))}
        placed[key] = replace(row, settings={**row.settings, **own})
    if others := [name for name in places if name not in known]:
        there = f"{nearest(others[0], known)}; there are {', '.join(known)}"
        raise ConfigError(f"scale {scale.name} has no place {others[0][:80]!r}{there}")
    return Scale(scale.name, placed)
