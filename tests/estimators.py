"""Small fitted models of scikit-learn for tests, from data that comes with it or is made here."""

from __future__ import annotations

from typing import Any

import numpy as np


def classifier() -> Any:
    """Which species an iris is, as a word, by its four measures."""
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    iris = load_iris()
    return LogisticRegression(max_iter=500).fit(iris.data, iris.target_names[iris.target])


def flowers() -> Any:
    """The four measures of 150 irises."""
    from sklearn.datasets import load_iris

    return load_iris().data


def doubled(features: Any) -> Any:
    return 2 * features


def several_targets() -> Any:
    """A forest that tells two things at once, one of two and one of three classes."""
    from sklearn.ensemble import RandomForestClassifier

    features = np.random.default_rng(7).normal(size=(60, 3))
    targets = np.stack([features[:, 0] > 0, np.digitize(features[:, 1], [-0.5, 0.5])], axis=1).astype(int)
    return RandomForestClassifier(n_estimators=4, random_state=0).fit(features, targets)


def regressor() -> Any:
    from sklearn.linear_model import LinearRegression

    features = np.arange(12.0).reshape(6, 2)
    return LinearRegression().fit(features, features.sum(axis=1))


def sentiment() -> Any:
    """Whether a text is glad or sad, by its words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = ["a good day", "what a great thing", "a bad day", "what an awful thing"]
    return make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, ["glad", "glad", "sad", "sad"])


def rents() -> Any:
    """What a flat costs, by columns of a data frame: a town, an area, a number of rooms."""
    import pandas as pd
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    table = pd.DataFrame(
        {
            "town": ["Bonn", "Ulm", "Bonn", "Jena", "Ulm", "Jena"],
            "area": [50.0, 80.0, 70.0, 40.0, 60.0, 90.0],
            "rooms": [2, 3, 3, 1, 2, 3],
        }
    )
    columns = ColumnTransformer(
        [
            ("town", OneHotEncoder(), ["town"]),
            ("area", StandardScaler(), ["area"]),
            ("rooms", OrdinalEncoder(), ["rooms"]),
        ]
    )
    return make_pipeline(columns, LinearRegression()).fit(table, [700, 900, 950, 500, 720, 880])
