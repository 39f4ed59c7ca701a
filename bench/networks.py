"""The networks that record_trace.py trains: their parameters have the shapes of shapes.py, in its order."""
from typing import Callable, Dict, List, NamedTuple

import torch
from torch.nn import functional

DROPOUT, TOKENS = 0.1, 128  # of BERT


class Bottleneck(torch.nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, projects: bool):
        super().__init__()
        self.narrow = convolution(width_in, width, 1, 1)
        self.middle = convolution(width, width, 3, stride)
        self.wide = convolution(width, 4 * width, 1, 1)
        self.shortcut = convolution(width_in, 4 * width, 1, stride) if projects else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.middle(torch.relu(self.narrow(x))))
        return torch.relu(self.wide(y) + self.shortcut(x))


class ResNet50(torch.nn.Module):
    """He et al. 2015, table 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 64, 7, 2)
        blocks, width_in = [], 64
        for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            for block in range(count):
                blocks.append(Bottleneck(width_in, width, 2 if stage and block == 0 else 1, block == 0))
                width_in = 4 * width
        self.blocks = torch.nn.Sequential(*blocks)
        self.head = torch.nn.Linear(2048, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.stem(images)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def convolution(width_in: int, width: int, kernel: int, stride: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False),
                               torch.nn.BatchNorm2d(width))


class VGG16(torch.nn.Module):
    """Simonyan & Zisserman 2015, table 1, D."""

    def __init__(self) -> None:
        super().__init__()
        features: List[torch.nn.Module] = []
        width_in = 3
        for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            for _ in range(count):
                features += [torch.nn.Conv2d(width_in, width, 3, padding=1), torch.nn.ReLU()]
                width_in = width
            features.append(torch.nn.MaxPool2d(2))
        self.features = torch.nn.Sequential(*features)
        self.classifier = torch.nn.Sequential(
            torch.nn.Linear(512 * 7 * 7, 4096), torch.nn.ReLU(), torch.nn.Dropout(0.5),
            torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(4096, 1000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


class Layer(torch.nn.Module):
    """A layer of a transformer that normalises after it adds (Devlin et al. 2019; Vaswani et al. 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.mix = (torch.nn.Linear(width, width) for _ in range(4))
        self.norm_of_attention = torch.nn.LayerNorm(width)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                                 for linear in (self.queries, self.keys, self.values))
        seen = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=DROPOUT)
        x = self.norm_of_attention(x + functional.dropout(self.mix(seen.transpose(1, 2).flatten(2)), DROPOUT))
        return self.norm(x + functional.dropout(self.narrow(functional.gelu(self.widen(x))), DROPOUT))


class BertBase(torch.nn.Module):
    """The encoder with its pooler, whose output stands for the logits of a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = torch.nn.Embedding(30522, 768), torch.nn.Embedding(512, 768)
        self.segments, self.norm = torch.nn.Embedding(2, 768), torch.nn.LayerNorm(768)
        self.layers = torch.nn.Sequential(*(Layer(768, 12) for _ in range(12)))
        self.pooler = torch.nn.Linear(768, 768)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1])
        x = self.words(words) + self.positions(places) + self.segments(places * 2 // len(places))
        x = self.layers(functional.dropout(self.norm(x), DROPOUT))
        return torch.tanh(self.pooler(x[:, 0]))


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 224, 224)


class Network(NamedTuple):
    title: str
    inputs: str  # what `batch` makes
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int], torch.Tensor]


NETWORKS: Dict[str, Network] = {
    "resnet50": Network("ResNet-50", "images of 224 x 224", ResNet50, images),
    "vgg16": Network("VGG-16", "images of 224 x 224", VGG16, images),
    "bert_base": Network("BERT-base with its pooler", f"sequences of {TOKENS} word pieces", BertBase,
                         lambda count: torch.randint(30522, (count, TOKENS))),
}
