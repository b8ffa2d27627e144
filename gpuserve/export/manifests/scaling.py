"""Constants of the exported autoscalers. ``docs/autoscaling.md`` has the simulation that decided them."""

from __future__ import annotations

from typing import Final

#: Of ``gpuserve_saturation``, the mean of all pods. Up to it each higher target needs fewer pods under all
#: the traffic simulated; above it more of a burst is refused, and pods that overshoot cost what was saved.
SATURATION_TARGET: Final = 0.8
#: Up at once: what waits for the next reading as well is refused meanwhile.
UP_WINDOW_S: Final = 0
#: Twice the pods in a minute, in which a pod starts. A queue that was left over makes a saturation far above
#: 1 and, until new pods share the load, asks for ever more of them.
UP_PERCENT: Final = 100
UP_PERIOD_S: Final = 60
#: Down to the most that was wanted in ten minutes: a third fewer requests of bursts are refused than with
#: the five minutes that are the default, for a sixth more pods under bursts and a twenty-fifth on days.
DOWN_WINDOW_S: Final = 600
#: A tenth of the pods in a minute, at least one.
DOWN_PERCENT: Final = 10
DOWN_PERIOD_S: Final = 60
