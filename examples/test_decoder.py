"""How a test of your own holds a model to its intent: `pytest examples`."""

from __future__ import annotations

import pytest
from examples.decoder import build, mended

import intently
from intently import Intent, Mask

CAUSAL = Intent(Mask.causal())


def test_attention_does_what_we_mean() -> None:
    intently.check(mended(), intent=CAUSAL).raise_if_broken()


def test_the_fault_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="causal-leak at attention"):
        intently.check(build(), intent=CAUSAL).raise_if_broken()
