"""Regions that are alike make one sheet, whatever lies between them; others keep their own."""

import pytest
import torch

from kvevents_service.transfer.sheet import sheets_of

MEMORY = torch.arange(4096)


def region(offset: int, stride: int = 8, words: int = 4, blocks: int = 6) -> torch.Tensor:
    return torch.as_strided(MEMORY, (blocks, words), (stride, 1), offset)


@pytest.mark.parametrize(
    ("views", "shapes"),
    [
        ([region(0), region(64), region(128)], [(6, 3, 4)]),
        ([region(0), region(4)], [(6, 2, 4)]),
        ([region(0), region(64), region(192)], [(6, 2, 4), (6, 1, 4)]),
        ([region(64), region(0)], [(6, 1, 4), (6, 1, 4)]),
        ([region(0), region(0)], [(6, 1, 4), (6, 1, 4)]),
        ([region(0), region(64, words=3), region(128)], [(6, 1, 4), (6, 1, 3), (6, 1, 4)]),
        ([region(0), region(64, stride=16)], [(6, 1, 4), (6, 1, 4)]),
        ([region(0), region(64, blocks=5)], [(6, 1, 4), (5, 1, 4)]),
        ([region(0), region(64).clone()], [(6, 1, 4), (6, 1, 4)]),
    ],
)
def test_a_sheet_is_what_is_alike_and_one_pitch_apart(views: list[torch.Tensor], shapes: list[tuple[int]]) -> None:
    sheets = sheets_of(views)
    assert [tuple(sheet.blocks.shape) for sheet in sheets] == shapes
    seen = [sheet.blocks[:, number] for sheet in sheets for number in range(sheet.blocks.shape[1])]
    assert all(torch.equal(one, other) for one, other in zip(seen, views, strict=True))
    columns = [sheet.column for sheet in sheets]
    assert columns == [sum(shape[1] * shape[2] for shape in shapes[:number]) for number in range(len(shapes))]
