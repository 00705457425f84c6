"""What is trained and for how long: the paper's models and budgets, and smaller ones in their place.

Scales differ in model, data and budget alone. Learning rates, strengths, powers, schedules and seeds of a
figure are the same at every scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from paceline.runs.config import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One row of the paper's table of models, at a scale."""

    title: str
    """The model that the paper trains here."""
    short: str
    """The model that is really trained, for names of runs: the same word, the same settings."""
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

        >>> PAPER.models["gpt2-124m"].budgets
        (2375, 3563, 4750)
        """
        return self.steps // 2, -(-3 * self.steps // 4), self.steps


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The paper's models at one scale, by the names that the figures use."""

    name: str
    models: Mapping[str, Model]


# --- The paper's ----------------------------------------------------------------------------------------

# The paper leaves open how often to evaluate, on how much of the held-out data, and what fits a GPU.
_OPEN: dict[str, Any] = {"precision": "bfloat16", "keep": 1}


def _tuned(
    title: str, model: str, batch_size: int, steps: int, parameters: float, *,
    data: str = "HuggingFaceTB/smol-smoltalk", short: str = "", template: str | None = "chatml",
) -> Model:  # fmt: skip
    settings: dict[str, Any] = {"task": "sft", "model": model, "data": (f"hf:{data}",)}
    settings |= {"chat_template": template, "length": 1280, "batch_size": batch_size, "steps": steps}
    settings |= {"micro_batch_size": 8, "held_out_samples": 512}
    settings |= {"evaluate_every": -(-steps // 25), "checkpoint_every": steps // 5}
    return Model(
        title=title, short=short or model.partition("/")[2].lower(), parameters=parameters,
        settings=_OPEN | settings,
    )  # fmt: skip


_GPT2: dict[str, Any] = {"model": "gpt2", "tokenizer": "gpt2", "compile": True}
_GPT2 |= {"data": ("hf:HuggingFaceFW/fineweb/sample-10BT",), "length": 1024, "batch_size": 512, "steps": 4750}
_GPT2 |= {"micro_batch_size": 32, "held_out_samples": 1024, "evaluate_every": 95, "checkpoint_every": 950}
PAPER = Scale(
    name="paper",
    models={
        "smollm2-135m": _tuned("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", 128, 889, 135e6),
        "smollm2-135m-long": _tuned("SmolLM2-135M, long", "HuggingFaceTB/SmolLM2-135M", 128, 3557, 135e6),
        "smollm2-1.7b": _tuned("SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B", 256, 1778, 1.7e9),
        "qwen3-1.7b": _tuned("Qwen3-1.7B", "Qwen/Qwen3-1.7B", 256, 1779, 1.7e9, template=None),
        "qwen3-1.7b-tulu": _tuned(
            "Qwen3-1.7B on tulu-3", "Qwen/Qwen3-1.7B", 256, 1779, 1.7e9, template=None,
            data="allenai/tulu-3-sft-mixture", short="qwen3-1.7b-tulu",
        ),
        "gemma3-1b": _tuned("Gemma3-1B", "google/gemma-3-1b-pt", 256, 1779, 1.0e9),
        "gpt2-124m": Model(title="GPT-2-124M", short="gpt2", parameters=124e6, settings=_OPEN | _GPT2),
    },
)  # fmt: skip

# --- Smaller --------------------------------------------------------------------------------------------


_Small = tuple[float, int, Mapping[str, Any]]


def _smaller(name: str, tuned: _Small, trained: _Small) -> Scale:
    """Make a scale of two models: one for all that the paper fine-tunes, one for what it pretrains.

    Each is its parameters, how often it is evaluated, and its settings.
    """
    models = {}
    for key, row in PAPER.models.items():
        parameters, evaluations, settings = tuned if row.settings.get("task") == "sft" else trained
        steps = settings["steps"] * (4 if key.endswith("-long") else 1)
        often = {"evaluate_every": max(1, steps // evaluations), "checkpoint_every": max(1, steps // 2)}
        models[key] = Model(
            title=row.title,
            short=str(settings["model"]).rpartition("/")[2].replace(":", "-").lower(),
            parameters=parameters,
            settings={**settings, **often, "steps": steps, "keep": 1},
        )
    return Scale(name=name, models=models)


GPU = _smaller(
    "gpu",
    (135e6, 20, {"task": "sft", "model": "HuggingFaceTB/SmolLM2-135M", "chat_template": "chatml"}
     | {"data": ("hf:HuggingFaceTB/smol-smoltalk",), "held_out_samples": 128, "precision": "bfloat16"}
     | {"length": 1024, "batch_size": 32, "micro_batch_size": 16, "steps": 300}),
    (7.4e6, 40, {"model": "gpt:7m", "data": ("hf:Salesforce/wikitext/wikitext-103-raw-v1",), "compile": True}
     | {"tokenizer": "bpe:4096", "held_out_samples": 768, "precision": "bfloat16"}
     | {"length": 256, "batch_size": 64, "steps": 2000}),
)  # fmt: skip
CPU = _smaller(
    "cpu",
    (0.05e6, 5, {"task": "sft", "model": "tiny-chat-model", "data": ("chat.jsonl",), "device": "cpu"}
     | {"length": 64, "batch_size": 2, "steps": 20, "held_out_samples": 2, "precision": "float32"}),
    (0.14e6, 5, {"model": "gpt:0.3m", "data": ("python",), "tokenizer": "bpe:512", "device": "cpu"}
     | {"length": 32, "batch_size": 4, "steps": 20, "held_out_samples": 8, "precision": "float32"}),
)  # fmt: skip
SCALES = {scale.name: scale for scale in (PAPER, GPU, CPU)}


Places = Mapping[str, Sequence[str] | None]


def located(scale: Scale, data: Places | None = None, models: Mapping[str, str] | None = None) -> Scale:
    """Return a scale whose data and models are on this machine instead of the hub. Names of runs stay.

    `data` are files or folders by what they are for: text, chat, tulu, or those with "_held_out" behind.
    `models` are folders by the model that the scale names, with or without its owner.

    >>> here = located(GPU, data={"text": ("wiki.jsonl.xz",)}, models={"SmolLM2-135M": "smollm2"})
    >>> here.models["gpt2-124m"].settings["data"], here.models["gemma3-1b"].settings["model"]
    (('wiki.jsonl.xz',), 'smollm2')
    """
    given = {name: tuple(items) for name, items in (data or {}).items() if items}
    tuned = {str(row.settings["model"]) for row in scale.models.values() if row.settings.get("task") == "sft"}
    folders = {}
    for name, folder in (models or {}).items():
        found = [full for full in tuned if name.lower() in (full.lower(), full.rpartition("/")[2].lower())]
        if not found:
            there = ", ".join(sorted(tuned))
            raise ConfigError(f"scale {scale.name} fine-tunes no {name[:80]!r}; there are {there}")
        folders[found[0]] = folder
    placed = {}
    for key, row in scale.models.items():
        # By the data: at smaller scales the run on tulu is the one on the other data.
        tulu = "tulu" in row.settings["data"][0]
        kind = "text" if row.settings.get("task") != "sft" else "tulu" if tulu else "chat"
        own: dict[str, Any] = {"model": folders.get(str(row.settings["model"]), row.settings["model"])}
        own |= {"data": given[kind]} if kind in given else {}
        own |= {"held_out": given[kind + "_held_out"]} if kind + "_held_out" in given else {}
        placed[key] = replace(row, settings={**row.settings, **own})
    return Scale(name=scale.name, models=placed)
