"""Zamba2's steps differ from its whole forward: the lower limit of the time step holds in the scan and not in a step.

Call: default settings, one token at a time through the cache. Zamba2MambaMixer hands `time_step_limit` (from 0.001 on) to
`mamba2_chunk_scan` and not to `mamba2_selective_state_update`, which clamps nothing (models/zamba2/modeling_zamba2.py, lines 487
and 820 to 833). Also: nemotron_h, and every type with `time_step_limit` once it is set (mamba2, bamba, falcon_h1, granitemoehybrid).
"""

import sys

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM, Zamba2Config, Zamba2ForCausalLM

zamba = Zamba2Config(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, layers_block_type=["mamba", "hybrid"], mamba_ngroups=1, mamba_d_state=8,
    n_mamba_heads=4, mamba_headdim=16, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64, num_mem_blocks=1,
    adapter_rank=4, initializer_range=0.2, chunk_size=16,
)  # fmt: skip
nemotron = NemotronHConfig(
    vocab_size=50, hidden_size=32, layers_block_type=["mamba", "attention"], mamba_num_heads=4, mamba_head_dim=16, n_groups=1,
    ssm_state_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64, initializer_range=0.2, chunk_size=16,
)  # fmt: skip
shown = False
for config, model_class in ((zamba, Zamba2ForCausalLM), (nemotron, NemotronHForCausalLM)):
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, -8)  # softplus(-8) is 0.0003, below the limit
    tokens = torch.randint(3, 50, (1, 12))
    with torch.no_grad():
        whole, past, steps = model(tokens).logits[0], None, []
        for i in range(12):
            output = model(tokens[:, i : i + 1], cache=past, use_cache=True, position_ids=torch.tensor([[i]]))
            past = output.cache
            steps.append(output.logits[0])
    gap = float((torch.cat(steps) - whole).abs().max())
    shown |= gap > 1e-3
    print(
        f"{model_class.__name__}: steps against the whole forward {gap:.3g}, at logits up to {float(whole.abs().max()):.3g}"
    )
sys.exit(shown)
