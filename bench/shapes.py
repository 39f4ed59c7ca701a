"""Shapes of gradients that benchmarks exchange."""
from typing import List, Tuple

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
