"""The public cases, in the order of their faults' stages."""

from __future__ import annotations

from benchmarks.cases.case import Case

NO_RELEASE = "no later release"

CASES = (
    Case("llama_looking", "huggingface/transformers#30652", "causal-leak", "transformers==4.40.2", "transformers==4.41.2"),
    Case("mllama_cross", "huggingface/transformers#48172", "causal-extra", "transformers==5.24.0", why=NO_RELEASE),
    Case(
        "gemma3_bidirectional", "UKPLab/sentence-transformers#3725", "causal-extra", "transformers==4.56.0",
        "transformers==4.57.6",
    ),
    Case(
        "gpt2_cross", "huggingface/transformers#47946", "memory-mask-ignored", "transformers==5.15.0",
        "transformers==5.16.1",
    ),
    Case(
        "label_attention", "InseeFrLab/torchTextClassifiers#92", "mask-inverted", "torchtextclassifiers==1.0.4",
        "torchtextclassifiers==2.0.0 scikit-learn",
    ),
    Case(
        "eva", "huggingface/pytorch-image-models#2236", "mask-ignored", "timm==1.0.7 torchvision==0.28.0",
        "timm==1.0.8 torchvision==0.28.0", without=True,
    ),
    Case(
        "attention2d", "huggingface/pytorch-image-models#2385", "scale-wrong-width", "timm==1.0.12 torchvision==0.28.0",
        "timm==1.0.13 torchvision==0.28.0", without=True,
    ),
    Case(
        "vit_dropout", "huggingface/pytorch-image-models#1978", "dropout-in-eval", "timm==0.9.7 torchvision==0.28.0",
        "timm==0.9.8 torchvision==0.28.0", without=True,
    ),
    Case(
        "ddpm", "labmlai/annotated_deep_learning_paper_implementations#146", "softmax-wrong-axis", "labml-nn==0.4.129",
        "labml-nn==0.4.131",
    ),
    Case(
        "grouped", "fkodom/grouped-query-attention-pytorch#5", "kv-heads-misordered",
        "grouped-query-attention-pytorch==0.2.0 einops", "grouped-query-attention-pytorch==0.3.0 einops", without=True,
    ),
    Case(
        "phi3_window", "huggingface/transformers#33586", "window-ignored", "transformers==4.45.2", "transformers==4.46.3",
    ),
    Case("xformers_rotary", "facebookresearch/xformers#841", "rope-wrong-axis", "xformers==0.0.21", why="the same code in 0.0.28", without=True),
    Case(
        "gpt2_padding", "huggingface/trl#469", "position-shifted-by-padding", "transformers==5.24.0",
        why="by design: the caller passes position_ids",
    ),
    Case(
        "cached_flash", "lucidrains/x-transformers#187", "cache-misaligned",
        "x-transformers==1.21.1 einops packaging", "x-transformers==1.22.21 einops packaging einx", without=True,
    ),
    Case("llama_packed", "huggingface/transformers#46634", "documents-leak", "transformers==5.24.0", why=NO_RELEASE),
    Case("float64_gemma2", "found by this check", "not-finite", "transformers==5.24.0", why=NO_RELEASE),
    Case("float64_bloom", "found by this check", "not-finite", "transformers==5.24.0", why=NO_RELEASE),
    Case("float64_mpt", "found by this check", "not-finite", "transformers==5.24.0", why=NO_RELEASE),
)  # fmt: skip
