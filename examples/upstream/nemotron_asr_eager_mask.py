"""The streaming encoder of Nemotron ASR hides what it should see under eager attention, and gives NaN.

Call: `attn_implementation="eager"`, any input, with or without an attention mask.
Where: models/nemotron_asr_streaming/modeling_nemotron_asr_streaming.py, the encoder's attention:
`matrix_bd.masked_fill_(attention_mask.logical_not(), -inf)` takes a bool mask; under eager the mask is a float one, 0
where a key is seen, so that seen keys are hidden and hidden ones seen.
"""

import sys

import torch
from transformers import NemotronAsrStreamingEncoderConfig
from transformers.models.nemotron_asr_streaming.modeling_nemotron_asr_streaming import NemotronAsrStreamingEncoder

torch.manual_seed(0)
config = NemotronAsrStreamingEncoderConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    subsampling_conv_channels=16, num_mel_bins=80,
)  # fmt: skip
model = NemotronAsrStreamingEncoder(config).eval()
sound = torch.randn(1, 128, 80)

found = {}
for name in ("sdpa", "eager"):
    model.set_attn_implementation(name)
    with torch.no_grad():
        found[name] = model(sound).last_hidden_state
    print(f"{name}: {int(found[name].isfinite().sum())} of {found[name].numel()} values are finite")
sys.exit(bool(found["sdpa"].isfinite().all()) and not found["eager"].isfinite().all())
