"""Writes smooth.pt2: from signals to smoother ones, and how much rougher they were.

``torch.export`` keeps the program, the weights and the shapes in one file, without the class below.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


class Smooth(torch.nn.Module):
    """A weighted mean over five samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([[[1.0, 2.0, 3.0, 2.0, 1.0]]]) / 9)

    def forward(self, signal: torch.Tensor) -> dict[str, torch.Tensor]:
        """``signal``: [rows, 16]. ``smooth``: the same shape; ``roughness``: [rows, 2], before and after."""
        padded = torch.nn.functional.pad(signal[:, None], (2, 2), mode="replicate")
        smooth = torch.nn.functional.conv1d(padded, self.weights)[:, 0]
        roughness = [one.diff(dim=1).abs().mean(dim=1) for one in (signal, smooth)]
        return {"smooth": smooth, "roughness": torch.stack(roughness, dim=1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).with_name("smooth.pt2"))
    file = parser.parse_args().file
    rows = torch.export.Dim("rows", max=64)  # the batch axis
    program = torch.export.export(
        Smooth().eval(), (torch.zeros(2, 16),), dynamic_shapes={"signal": {0: rows}}
    )
    torch.export.save(program, file)
    print(f"written: {file}")


if __name__ == "__main__":
    main()
