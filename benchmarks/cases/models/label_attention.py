"""Label attention over the embeddings of a text."""

import torch
from torch import Tensor, nn
from torchTextClassifiers.model.components import text_embedder

from intently import Intent, Mask, Target


class Labels(nn.Module):
    """The embedder and the labels that attend to its tokens, however the release puts the two together."""

    def __init__(self) -> None:
        super().__init__()
        labels = text_embedder.LabelAttentionConfig
        if hasattr(text_embedder, "TextEmbedderConfig"):
            config = text_embedder.TextEmbedderConfig(
                vocab_size=64, embedding_dim=32, padding_idx=0, label_attention_config=labels(n_head=4, num_classes=3)
            )
            self.embed, self.attend = text_embedder.TextEmbedder(config), None
        else:
            tokens = text_embedder.TokenEmbedderConfig(vocab_size=64, embedding_dim=32, padding_idx=0)
            config = text_embedder.SentenceEmbedderConfig(
                aggregation_method=None, label_attention_config=labels(embedding_dim=32, n_head=4, num_classes=3)
            )
            self.embed, self.attend = text_embedder.TokenEmbedder(tokens), text_embedder.SentenceEmbedder(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self.attend is None:
            return self.embed(input_ids, attention_mask)["sentence_embedding"]
        found = self.embed(input_ids, attention_mask)
        return self.attend(found["token_embeddings"], attention_mask)["sentence_embedding"]


def build() -> Target:
    torch.manual_seed(0)
    model = Labels().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Target(model, Intent(Mask.full()), tokens=64, padding="attention_mask:keep")
