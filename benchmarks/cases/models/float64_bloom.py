"""A tiny bloom, checked in float64: a row padded on the left sees two finite minima added."""

from intently import Target
from intently.targets.huggingface import tiny


def build() -> Target:
    return tiny("bloom")
