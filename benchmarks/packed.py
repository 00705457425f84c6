"""What packing several conversations into a sequence costs: `python benchmarks/packed.py` on one GPU.

Forward and backward of a Llama with SmolLM2-135M's shape and random weights, 16 × 1,024 tokens in bfloat16:
sequences of one conversation, of three with a mask between them, and the latter compiled, as
`paceline train --compile` does it; and of what is packed the time of attention alone. They are timed one
after the other.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paceline.experiments.bench.command import environment
from paceline.experiments.bench.measure import seconds
from paceline.lm.batch import Batch
from paceline.lm.evaluate import autocast, summed_loss
from paceline.lm.pretrained import Pretrained


def llama(small: bool) -> Pretrained:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if not small:
        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3}
    vocabulary = 512 if small else 49152
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **sizes)
    return Pretrained(LlamaForCausalLM(config))


def three_examples(length: int) -> Tensor:
    """Positions of a sequence: about a half, a quarter and the rest."""
    cuts = length // 2 - 20, length // 4
    return torch.cat([torch.arange(count) for count in (*cuts, length - sum(cuts))])


def attention_ms(step: Callable[[], None]) -> float:
    """Of all kernels that attention's operations launched."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    names = "_attention_forward", "_attention_backward"
    times = [one.self_device_time_total for one in found.key_averages() if one.key.endswith(names)]
    assert sum(times) > 0, "no operation of attention is called as here"
    return sum(times) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--small", action="store_true", help="a tiny model, also on a CPU, to try this program"
    )
    parser.add_argument("--record", type=Path, help="write the figures here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        parser.error("needs a GPU, or --small")
    rows, length = (2, 64) if options.small else (16, 1024)
    precision = torch.bfloat16 if device == "cuda" else torch.float32
    model = llama(options.small).to(device).train()
    tokens = torch.randint(0, model.vocabulary, (rows, length + 1)).to(device)
    apart = three_examples(length).expand(rows, length).contiguous().to(device)
    compiled: Any = torch.compile(summed_loss)

    def stepping(loss_of: Any, positions: Tensor | None) -> Callable[[], None]:
        batch = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], positions=positions)

        def step() -> None:
            with autocast(torch.device(device), precision):
                loss = loss_of(model, batch)
            loss.backward()

        return step

    contenders = {
        "one conversation a sequence": stepping(summed_loss, None),
        "packed": stepping(summed_loss, apart),
        "packed, compiled": stepping(compiled, apart),
    }
    found = []
    for name, step in contenders.items():
        for _ in range(3):
            step()
        ms = 1e3 * statistics.median([seconds(step, device) for _ in range(options.rounds)])
        found.append({"what": name, "ms": ms})
        print(f"{name:28} {ms:8.1f} ms")
    attention = attention_ms(contenders["packed"]) if device == "cuda" else None
    if attention is not None:
        print(f"{'attention of packed':28} {attention:8.1f} ms")
    if options.record:
        about = {"benchmark": "packed", **environment(device), "rounds": options.rounds}
        about |= {"rows": found, "attention_ms": attention}
        options.record.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
