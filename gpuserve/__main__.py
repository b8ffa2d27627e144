"""Entry point of ``python -m gpuserve``, the same as the ``gpuserve`` script."""

from __future__ import annotations

from gpuserve.cli import main

if __name__ == "__main__":
    main()
