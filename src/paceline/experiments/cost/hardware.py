"""GPUs, by what their makers state, and what is known of how much of it is reached."""

from dataclasses import dataclass
from typing import final

from paceline.experiments.config import ConfigError, nearest
from paceline.lm.shapes import PEAK

COPYING = 4.265e12 / 4.8e12
"""Share of the stated bandwidth that copying a large tensor reaches, reads and writes counted: 4.27 of 4.8
TB/s on an H200 (records/2026-11-18-step-h200.json). Taken for the others too, where nothing was measured."""

PRODUCTS = 0.70
"""Share of the stated operations that large matrix products reach. Fitted to forward
and backward of GPT-2 on an H200, 33.1 ms (records/2026-11-16-share-h200.json). Taken for the others too."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One GPU and its links; bytes and seconds, no binary prefixes."""

    name: str
    peak: float
    """Dense operations a second in bfloat16."""
    peak_float32: float
    """The same of float32 matrices, TF32 not used."""
    memory: float
    bandwidth: float
    """Of its own memory, bytes a second, as stated."""
    link: float
    """To another GPU of its node, bytes a second in one direction."""
    network: float
    """To another node, bytes a second in one direction, for each GPU."""
    node: int = 8
    """GPUs of a node."""
    copying: float = COPYING
    products: float = PRODUCTS

    @property
    def copy_bandwidth(self) -> float:
        """Bytes a second that copying reaches."""
        return self.bandwidth * self.copying


# NVLink is stated for both directions together; half of it is `link`. `network` is one adapter of 400 Gb/s
# (A100: 200 Gb/s) for each GPU, as in the makers' own servers.
HARDWARE: dict[str, Hardware] = {
    "a100": Hardware(
        name="A100 SXM 80 GB",
        peak=PEAK["A100"],
        peak_float32=19.5e12,
        memory=80e9,
        bandwidth=2.039e12,
        link=300e9,
        network=25e9,
    ),
    "h100": Hardware(
        name="H100 SXM",
        peak=PEAK["H100"],
        peak_float32=67e12,
        memory=80e9,
        bandwidth=3.35e12,
        link=450e9,
        network=50e9,
    ),
    "h200": Hardware(
        name="H200 SXM",
        peak=PEAK["H200"],
        peak_float32=67e12,
        memory=141e9,
        bandwidth=4.8e12,
        link=450e9,
        network=50e9,
    ),
    "b200": Hardware(
        name="B200",
        peak=PEAK["B200"],
        peak_float32=75e12,
        memory=180e9,
        bandwidth=8.0e12,
        link=900e9,
        network=50e9,
    ),
}


def hardware_of(name: str) -> Hardware:
    """A GPU by name.

    >>> hardware_of("H200").memory
    141000000000.0
    """
    known = HARDWARE.get(name.lower())
    if known is None:
        raise ConfigError(
            f"hardware {name[:80]!r} is unknown{nearest(name.lower(), list(HARDWARE))}; "
            f"there are: {', '.join(HARDWARE)}"
        )
    return known
