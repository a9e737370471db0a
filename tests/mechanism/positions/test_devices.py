"""Everything is computed where its arguments are: on the device "meta", a tensor made elsewhere raises."""

from __future__ import annotations

import pytest
import torch

from intently.mechanism import positions as p
from intently.mechanism import steady

AT = torch.arange(6, device="meta")
STATES = torch.zeros(2, 4, 6, 8, device="meta")
KEEP = torch.ones(2, 6, dtype=torch.bool, device="meta")

CALLS = {
    "rotary": lambda: p.Rotary(8)(STATES, AT),
    "linear": lambda: p.Rotary(8, scaling=p.Linear(2.0))(STATES, AT),
    "ntk": lambda: p.Rotary(8, scaling=p.NTKAware(2.0))(STATES, AT),
    "dynamic": lambda: p.Rotary(8, scaling=p.DynamicNTK(2.0, trained=4))(STATES, AT),
    "yarn": lambda: p.Rotary(8, scaling=p.YaRN(2.0, trained=64))(STATES, AT),
    "llama3": lambda: p.Rotary(8, scaling=p.Llama3(2.0, trained=64))(STATES, AT),
    "longrope": lambda: p.Rotary(8, scaling=p.LongRoPE((1.0,) * 4, (2.0,) * 4, trained=4, factor=2.0))(STATES, AT),
    "conversion": lambda: p.half_to_interleaved(p.interleaved_to_half(torch.zeros(8, 3, device="meta"), 2), 2),
    "grid": lambda: p.grid_angles(p.grid_places(2, 3, device="meta"), 8).cos,
    "sections": lambda: p.sectioned_angles(p.grid_places(2, 3, device="meta"), (1, 3)).sin,
    "sinusoidal": lambda: p.sinusoidal(AT, 8),
    "learned": lambda: p.LearnedPositions(8, 4, offset=2, padding=1).to("meta")(AT.expand(2, 6), KEEP),
    "alibi": lambda: p.alibi(4)(AT[:, None], AT),
    "relative": lambda: p.RelativeBias(8, 16, heads=4, bidirectional=True).to("meta")(AT[:, None], AT),
    "padding": lambda: p.positions_from_padding(KEEP),
    "documents": lambda: p.positions_from_documents(KEEP.long()),
    "layer norm": lambda: steady.QKLayerNorm(8, bias=True).to("meta")(STATES, STATES)[0],
    "rms norm": lambda: steady.QKRMSNorm(8).to("meta")(STATES, STATES)[0],
    "rms norm across heads": lambda: steady.QKRMSNormAcrossHeads(4, width=8).to("meta")(STATES, STATES)[0],
    "l2 norm": lambda: steady.QKL2Norm(8).to("meta")(STATES, STATES)[0],
    "row entropy": lambda: steady.row_entropy(STATES),
}


@pytest.mark.parametrize("name", CALLS)
def test_stays_on_the_device_of_its_arguments(name):
    assert CALLS[name]().device.type == "meta"


def test_a_tensor_made_elsewhere_is_noticed():
    # The control.
    with pytest.raises(RuntimeError, match="device"):
        STATES * torch.arange(8.0)
