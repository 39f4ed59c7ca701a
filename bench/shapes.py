"""Shapes of gradients that benchmarks exchange."""
from typing import Callable, Dict, List, Tuple

Shape = Tuple[int, ...]

TINY: List[Shape] = [(16,)] * 161  # so small that bytes do not count


def resnet50() -> List[Shape]:
    """The 161 parameters of ResNet-50 (He et al. 2015, table 1) in order: 25,557,032 numbers."""
    def norm(width: int) -> List[Shape]:
        return [(width,), (width,)]

    shapes: List[Shape] = [(64, 3, 7, 7), *norm(64)]
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += [(width, width_in, 1, 1), *norm(width), (width, width, 3, 3), *norm(width)]
            shapes += [(4 * width, width, 1, 1), *norm(4 * width)]
            if block == 0:
                shapes += [(4 * width, width_in, 1, 1), *norm(4 * width)]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def vgg16() -> List[Shape]:
    """The 32 parameters of VGG-16 (Simonyan & Zisserman 2015, table 1, D) in order: 138,357,544 numbers."""
    shapes: List[Shape] = []
    width_in = 3
    for convolutions, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(convolutions):
            shapes += [(width, width_in, 3, 3), (width,)]
            width_in = width
    for width_in, width in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        shapes += [(width, width_in), (width,)]
    return shapes


def bert_base() -> List[Shape]:
    """The 199 parameters of the encoder of BERT-base, uncased (Devlin et al. 2019, section 3: 12 layers, 768 wide, 12
    heads; 30,522 word pieces, 512 positions, 2 segments), with the pooler, in order: 109,482,240 numbers."""
    width, inner = 768, 4 * 768

    def linear(width_in: int, width_out: int) -> List[Shape]:
        return [(width_out, width_in), (width_out,)]

    norm: List[Shape] = [(width,), (width,)]
    attention = [*linear(width, width) * 4, *norm]  # queries, keys, values, and what comes of them
    layer = [*attention, *linear(width, inner), *linear(inner, width), *norm]
    embeddings: List[Shape] = [(30522, width), (512, width), (2, width), *norm]
    return [*embeddings, *layer * 12, *linear(width, width)]


MODELS: Dict[str, Callable[[], List[Shape]]] = {"resnet50": resnet50, "vgg16": vgg16, "bert_base": bert_base,
                                               "tiny": lambda: TINY}
