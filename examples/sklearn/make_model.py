"""Fits a model of scikit-learn and writes it: ``make_model.py FILE``"""

from __future__ import annotations

import sys

import skops.io
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def main(file: str) -> None:
    """Learns the species of 150 irises, as words, by the sizes of their sepals and petals in cm."""
    irises = load_iris()
    model = make_pipeline(StandardScaler(), LogisticRegression())
    model.fit(irises.data, irises.target_names[irises.target])
    skops.io.dump(model, file)


if __name__ == "__main__":
    main(sys.argv[1])
