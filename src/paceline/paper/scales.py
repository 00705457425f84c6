"""What is trained and for how long: the paper's models and budgets, and smaller ones in their place.

Scales differ in model, data and budget. Everything else of a run is said in `cells` and `spaces`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from paceline.runs.config import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """One row of the paper's table of models, at a scale."""

    title: str
    """What the paper trains here."""
    short: str
    """What is really trained, for names of runs: the same word, the same settings."""
    parameters: float
    """About how many, for the cost."""
    settings: Mapping[str, Any]
    """Of `Run`: model, data, length, batch_size, steps and what goes with them."""
    budgets: tuple[int, ...] = ()
    """Steps at which decayed branches end: 50, 75 and 100 % of the run."""

    @property
    def steps(self) -> int:
        """Of a whole run."""
        return int(self.settings["steps"])


@final
@dataclass(frozen=True, kw_only=True, eq=False)  # equal if the same one: what is made of it can be kept
class Scale:
    """All models of the paper at one scale, by the names that `spaces` and `labels` use."""

    name: str
    models: Mapping[str, Trained]


# --- As in the paper ----------------------------------------------------------------------------------

# What the paper leaves open: how often and on how much of the held-out data to evaluate, and what fits a GPU.
_LOOKS: dict[str, Any] = {"precision": "bfloat16", "keep": 1}


def _tuned(
    title: str,
    model: str,
    batch_size: int,
    steps: int,
    parameters: float,
    *,
    data: str = "HuggingFaceTB/smol-smoltalk",
    short: str | None = None,
    template: str | None = "chatml",
    budgets: tuple[int, ...] = (),
) -> Trained:
    return Trained(
        title=title,
        short=short or model.partition("/")[2].lower(),
        parameters=parameters,
        settings=_LOOKS
        | {"task": "sft", "model": model, "data": (f"hf:{data}",), "chat_template": template}
        | {"length": 1280, "batch_size": batch_size, "steps": steps, "micro_batch_size": 8}
        | {"held_out_samples": 512, "evaluate_every": -(-steps // 25), "checkpoint_every": steps // 5},
        budgets=budgets,
    )


_SMALL = ("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", 128)
PAPER = Scale(
    name="paper",
    models={
        "smollm2-135m": _tuned(*_SMALL, 889, 135e6, budgets=(444, 667, 889)),
        "smollm2-135m-long": _tuned("SmolLM2-135M, long", *_SMALL[1:], 3557, 135e6),
        "smollm2-1.7b": _tuned("SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B", 256, 1778, 1.7e9),
        "qwen3-1.7b": _tuned("Qwen3-1.7B", "Qwen/Qwen3-1.7B", 256, 1779, 1.7e9, template=None),
        "qwen3-1.7b-tulu": _tuned(
            "Qwen3-1.7B on tulu-3", "Qwen/Qwen3-1.7B", 256, 1779, 1.7e9, template=None,
            data="allenai/tulu-3-sft-mixture", short="qwen3-1.7b-tulu",
        ),
        "gemma3-1b": _tuned("Gemma3-1B", "google/gemma-3-1b-pt", 256, 1779, 1.0e9),
        "gpt2-124m": Trained(
            title="GPT-2-124M",
            short="gpt2",
            parameters=124e6,
            settings=_LOOKS
            | {"model": "gpt2", "data": ("hf:HuggingFaceFW/fineweb/sample-10BT",), "tokenizer": "gpt2"}
            | {"length": 1024, "batch_size": 512, "steps": 4750, "micro_batch_size": 32, "compile": True}
            | {"held_out_samples": 1024, "evaluate_every": 95, "checkpoint_every": 950},
            budgets=(2375, 3563, 4750),
        ),
    },
)  # fmt: skip


# --- Smaller --------------------------------------------------------------------------------------------


def _smaller(
    name: str,
    tuned: Mapping[str, Any],
    tuned_size: float,
    steps: int,
    trained: Mapping[str, Any],
    trained_size: float,
    trained_steps: int,
    looks: tuple[int, int],
) -> Scale:
    """Two models in place of the paper's: one for all that are fine-tuned, one that is pretrained."""

    def made(title: str, settings: Mapping[str, Any], size: float, steps: int, looks: int) -> Trained:
        word = str(settings["model"]).rpartition("/")[2].replace(":", "-").lower()
        return Trained(
            title=title,
            short=word,
            parameters=size,
            settings={
                **settings, "steps": steps, "keep": 1,
                "evaluate_every": max(1, steps // looks), "checkpoint_every": max(1, steps // 2),
            },
            budgets=(steps // 2, steps * 3 // 4, steps),
        )  # fmt: skip

    models = {}
    for key, row in PAPER.models.items():
        if row.settings.get("task") == "sft":
            own = steps * 4 if key.endswith("-long") else steps
            models[key] = made(row.title, tuned, tuned_size, own, looks[0])
        else:
            models[key] = made(row.title, trained, trained_size, trained_steps, looks[1])
    return Scale(name=name, models=models)


GPU = _smaller(
    "gpu",
    {"task": "sft", "model": "HuggingFaceTB/SmolLM2-135M", "data": ("hf:HuggingFaceTB/smol-smoltalk",)}
    | {"chat_template": "chatml", "length": 1024, "batch_size": 32, "micro_batch_size": 16}
    | {"precision": "bfloat16", "held_out_samples": 128},
    135e6,
    300,
    {"model": "gpt:7m", "data": ("hf:Salesforce/wikitext/wikitext-103-raw-v1",), "tokenizer": "bpe:4096"}
    | {"length": 256, "batch_size": 64, "precision": "bfloat16", "compile": True, "held_out_samples": 768},
    7.4e6,
    2000,
    (20, 40),
)
CPU = _smaller(
    "cpu",
    {"task": "sft", "model": "tiny-chat-model", "data": ("chat.jsonl",), "length": 64, "batch_size": 2}
    | {"precision": "float32", "held_out_samples": 2, "device": "cpu"},
    0.05e6,
    20,
    {"model": "gpt:0.3m", "data": ("python",), "tokenizer": "bpe:512", "length": 32, "batch_size": 4}
    | {"precision": "float32", "held_out_samples": 8, "device": "cpu"},
    0.14e6,
    20,
    (5, 5),
)
SCALES = {scale.name: scale for scale in (PAPER, GPU, CPU)}


# --- Elsewhere ------------------------------------------------------------------------------------------


def located(
    scale: Scale,
    *,
    text: tuple[str, ...] = (),
    text_held_out: tuple[str, ...] = (),
    chat: tuple[str, ...] = (),
    chat_held_out: tuple[str, ...] = (),
    tulu: tuple[str, ...] = (),
    tulu_held_out: tuple[str, ...] = (),
    models: Mapping[str, str] | None = None,
) -> Scale:
    """The same with data and models where they are on this machine: files and folders in place of the hub.

    `models` are folders by what they stand for: the model that the scale names. Names of runs stay.

    >>> here = located(GPU, text=("wiki.jsonl.xz",), models={"HuggingFaceTB/SmolLM2-135M": "smollm2"})
    >>> here.models["gpt2-124m"].settings["data"], here.models["gemma3-1b"].settings["model"]
    (('wiki.jsonl.xz',), 'smollm2')
    """
    known = {str(row.settings["model"]) for row in scale.models.values()}
    for name in models or {}:
        if name not in known:
            raise ConfigError(
                f"scale {scale.name} has no model {name!r}; there are {', '.join(sorted(known))}"
            )
    placed = {}
    for key, row in scale.models.items():
        data, held_out = chat, chat_held_out
        if row.settings.get("task") != "sft":
            data, held_out = text, text_held_out
        elif "tulu" in row.settings["data"][0]:
            data, held_out = tulu, tulu_held_out
        model = str(row.settings["model"])
        more: dict[str, Any] = {"model": (models or {}).get(model, model)}
        more |= {"data": data} if data else {}
        more |= {"held_out": held_out} if held_out else {}
        placed[key] = replace(row, settings={**row.settings, **more})
    return Scale(name=scale.name, models=placed)
