"""What the contract costs on top of torch's fused kernel: `attention` against the kernel called directly."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks import plot, timing, written
from intently.masks import Mask
from intently.mechanism import attention, choose_backend

HEADS, WIDTH = 8, 64
LENGTHS = (1024, 2048, 4096, 8192)


def main() -> None:
    rows = []
    series: dict[str, list[tuple[float, float]]] = {}
    for length in LENGTHS:
        query, key, value = torch.randn(3, 1, HEADS, length, WIDTH)
        # Every third key from the second on is hidden: a mask no kernel can skip blocks of, with no blind row.
        holes = (torch.arange(length) % 3 != 1).repeat(length, 1)
        for case, mask, direct in (
            ("unmasked", None, {}),
            ("causal", Mask.causal(), {"is_causal": True}),
            ("bool mask", holes, {"attn_mask": holes}),
        ):
            took = choose_backend(query, key, value, mask=mask)
            if took.name != "fused":
                raise RuntimeError(
                    f"{case}: auto took {took.name} ({took.reason}), and this measures the fused backend"
                )

            def ours(states=(query, key, value), mask=mask) -> torch.Tensor:
                return attention(*states, mask=mask)

            def kernel(states=(query, key, value), direct=direct) -> torch.Tensor:
                return F.scaled_dot_product_attention(*states, **direct)

            with torch.no_grad():
                apart = (ours() - kernel()).abs().max().item()
                times = timing.interleaved(
                    {"ours": ours, "kernel": kernel, "kernel again": kernel}, budget=4, least=3, most=25, warm=True
                )
            against = timing.ratio(times["ours"], times["kernel"])
            control = timing.ratio(times["kernel again"], times["kernel"])
            rows.append((case, length, timing.milliseconds(times["kernel"]), against, control, f"{apart:.1g}"))
            series.setdefault(case, []).append((length, against.middle))
            print(*rows[-1], sep=" | ", flush=True)
    columns = ("case", "length", "kernel, ms", "ours / kernel", "kernel / kernel", "largest difference")
    note = f"forward, {HEADS} heads of width {WIDTH}, float32; {timing.note()}; the last ratio is the noise"
    print(f"wrote {written.write('fused.md', written.table('The fused backend', columns, rows, note))}")
    written.picture("fused.svg", plot.lines("The fused backend against the kernel", "ours / kernel", series, "linear"))
