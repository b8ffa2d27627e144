"""Fits a model of scikit-learn and writes it beside this file, as flowers.skops."""

from __future__ import annotations

from pathlib import Path

import skops.io
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

FILE = Path(__file__).with_name("flowers.skops")


def main() -> None:
    """Learns the species of 150 irises, as words, by the sizes of their sepals and petals in cm."""
    irises = load_iris()
    model = make_pipeline(StandardScaler(), LogisticRegression())
    model.fit(irises.data, irises.target_names[irises.target])
    skops.io.dump(model, FILE)
    print(f"{FILE.name}: {FILE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
