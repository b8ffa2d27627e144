"""What can be wrong before and while a server is measured. Each text is one sentence for the user."""

from __future__ import annotations

from gpuserve.core.errors import GpuserveError


class BenchError(GpuserveError):
    """The server cannot be measured: it is not there, does not know the model, or a client process ended."""


class BenchOptionError(BenchError):
    """An option is wrong, or does not go with another or with the model."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(text)
        self.option = option

    def __str__(self) -> str:
        return f"{self.option}: {self.args[0]}"


def reason(error: Exception) -> str:
    """What the system says of an error, in lower case and without the address."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


class MissingPackage(BenchError):
    """A package of the extra ``bench`` is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"this needs the package {package}, which is not installed: pip install 'gpuserve[bench]'"
        )
