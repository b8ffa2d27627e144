"""``EnvironmentProblem``: why no worker can run in an environment."""


class EnvironmentProblem(Exception):
    """Its text is one sentence, with what is to be done."""
