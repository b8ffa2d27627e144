"""What ``gpuserve top`` shows and does at each key. Pure: no terminal, no server, no clock.

::

    MODELS ──enter──► MODEL       the list; one model with its instances
       │ /               │
    FILTER            + - r d u   ──► CONFIRM ──y──► a command for the server
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from rich.text import Text

from gpuserve.cli.top import rows as of
from gpuserve.cli.views.event_view import event_line
from gpuserve.core.states import StepTable

#: The keys, as a terminal sends them and as they are called here.
KEYS: Final[Mapping[str, str]] = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "g": "home",
    "\x1b[F": "end",
    "\x1b[4~": "end",
    "G": "end",
    "\r": "enter",
    "\n": "enter",
    "\x1b[C": "enter",
    "\x1b[D": "escape",
    "\x1b": "escape",
    "\x7f": "backspace",
    "\x08": "backspace",
}
_HELP: Final = (
    "up, down, j, k, page keys   choose a model",
    "enter, right                show its instances",
    "escape, left                back",
    "s, S                        sort by the next column, the other way round",
    "/                           show models whose name contains a text",
    "+, -                        scale the model by one instance on each device",
    "r                           load the model anew, beside the one that serves",
    "d, u                        drain the server, put it back into service",
    "p                           hold the picture, or go on",
    "q                           end this picture; the server goes on",
)
_KEY_LINE: Final = "enter instances  s sort  / filter  +- scale  r reload  d drain  p hold  h help  q quit"
_MAX_EVENTS: Final = 4
_UP: Final = "UP"
#: Lines of a terminal from which on events are shown.
_HIGH: Final = 18


class View(enum.Enum):
    """What the keys are for at a moment."""

    MODELS = "MODELS"
    MODEL = "MODEL"
    FILTER = "FILTER"
    CONFIRM = "CONFIRM"
    HELP = "HELP"


_STEPS: Final = StepTable(
    "top",
    {
        View.MODELS: {View.MODEL, View.FILTER, View.CONFIRM, View.HELP},
        View.MODEL: {View.MODELS, View.CONFIRM, View.HELP},
        View.FILTER: {View.MODELS},
        View.CONFIRM: {View.MODELS, View.MODEL},
        View.HELP: {View.MODELS, View.MODEL},
    },
)


class KeyCommand(NamedTuple):
    """What a key asks for: a verb for the server with its arguments, or "quit"."""

    verb: str
    arguments: dict[str, Any]
    question: str = ""


QUIT: Final = KeyCommand("quit", {})


class Screen:
    """The state of the picture: what is shown, which model is chosen, and what the next key means."""

    def __init__(self, sort: str = "req/s", containing: str = "") -> None:
        self.view = View.MODELS
        self.sort = sort
        self.reverse = False
        self.containing = containing
        #: What is told at the foot: the outcome of a command, or that the server is gone.
        self.notice = ""
        self._back = View.MODELS
        self._sample: of.Row | None = None
        self._held = False
        self._chosen = ""
        self._first = 0
        self._asked: KeyCommand | None = None
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_MAX_EVENTS)

    # ---- what comes in ------------------------------------------------------------------------

    def heard(self, event: Mapping[str, Any]) -> None:
        """Take an event; a sample is what the picture is made of."""
        if event["kind"] != "sample":
            self._events.append(event)
        elif not self._held:
            self._sample = event

    def pressed(self, raw: str) -> KeyCommand | None:
        """Take a key, as the terminal sent it; what the server is to be asked, or that this is the end."""
        if self.view is View.FILTER:
            self._write_filter(raw)
            return None
        key = KEYS.get(raw, raw)
        if self.view is View.CONFIRM:
            return self._confirm(key)
        self.notice = ""
        if self.view is View.HELP:
            self._go(self._back)
            return None
        return self._obey(key)

    # ---- keys ---------------------------------------------------------------------------------

    def _obey(self, key: str) -> KeyCommand | None:
        match key:
            case "q" if self.view is View.MODELS:
                return QUIT
            case "q" | "escape" if self.view is View.MODEL:
                self._go(View.MODELS)
            case "up" | "down" | "page up" | "page down" | "home" | "end":
                self._choose(key)
            case "enter" if self.view is View.MODELS and self._row() is not None:
                self._go(View.MODEL)
            case "/" if self.view is View.MODELS:
                self._go(View.FILTER)
            case "s":
                self.sort = of.SORTS[(of.SORTS.index(self.sort) + 1) % len(of.SORTS)]
            case "S":
                self.reverse = not self.reverse
            case "p":
                self._held = not self._held
            case "h" | "?":
                self._back = self.view
                self._go(View.HELP)
            case "+" | "-" | "r" | "d" | "u":
                self._ask(key)
        return None

    def _choose(self, key: str) -> None:
        titles = [str(one["title"]) for one in self._rows()]
        if not titles:
            return
        at = titles.index(self._chosen) if self._chosen in titles else 0
        steps = {"up": -1, "down": 1, "page up": -10, "page down": 10}
        ends = {"home": 0, "end": len(titles) - 1}
        at = ends.get(key, at + steps.get(key, 0))
        self._chosen = titles[min(max(at, 0), len(titles) - 1)]

    def _write_filter(self, raw: str) -> None:
        key = KEYS.get(raw, raw) if len(raw) > 1 or not raw.isprintable() else raw
        if key == "enter":
            self._go(View.MODELS)
        elif key == "escape":
            self.containing = ""
            self._go(View.MODELS)
        elif key == "backspace":
            self.containing = self.containing[:-1]
        elif key.isprintable() and len(key) == 1:
            self.containing += key

    def _ask(self, key: str) -> None:
        row = self._row()
        command = _command(key, row)
        if command is None:
            self.notice = (
                "there is no model to do that to" if row is None else "it has one instance on a device"
            )
            return
        self._asked, self._back = command, self.view
        self._go(View.CONFIRM)

    def _confirm(self, key: str) -> KeyCommand | None:
        command, self._asked = self._asked, None
        self._go(self._back)
        if key.lower() != "y" or command is None:
            self.notice = "nothing was done"
            return None
        self.notice = f"asked: {command.question} …"
        return command

    def _go(self, view: View) -> None:
        self.view = _STEPS.step(self.view, view)

    # ---- the picture --------------------------------------------------------------------------

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the lines of the picture, as many as there are in the terminal, none wider than it."""
        if self._sample is None:
            made = [Text(self.notice or "waiting for the server …")]
        elif self.view is View.HELP:
            made = [Text("Keys", "bold"), *map(Text, _HELP), Text(""), Text("any key goes back", "dim")]
        else:
            made = [*self._top(self._sample, width, height)]
        for one in made:
            one.truncate(width, overflow="ellipsis")
        return made[:height]

    def report(self, width: int) -> list[Text]:
        """Return all models, without keys and events."""
        assert self._sample is not None
        return [
            *_heading(self._sample, held=False),
            *self._models(width, len(self._rows()) + 1, marked=False),
        ]

    def _top(self, sample: of.Row, width: int, height: int) -> Iterator[Text]:
        head = list(_heading(sample, held=self._held))
        foot = list(self._foot(height))
        body = height - len(head) - len(foot)
        yield from head
        shown = list(self._model(width) if self._is_about_one() else self._models(width, body))[:body]
        yield from shown
        yield from [Text("")] * (body - len(shown))
        yield from foot

    def _is_about_one(self) -> bool:
        view = self._back if self.view is View.CONFIRM else self.view
        return view is View.MODEL and self._row() is not None

    def _models(self, width: int, height: int, *, marked: bool = True) -> Iterator[Text]:
        found = self._rows()
        columns = of.fitting(of.MODEL_COLUMNS, width)
        yield _line(of.cells(columns, None), self.sort, [one.head for one in columns])
        titles = [str(one["title"]) for one in found]
        at = titles.index(self._chosen) if self._chosen in titles else 0
        room = max(1, height - 1)
        self._first = min(max(self._first, at - room + 1, 0), at, max(0, len(found) - room))
        for number, row in enumerate(found[self._first : self._first + room], self._first):
            line = _line(of.cells(columns, row))
            if marked and number == at:
                line.stylize("reverse")
            yield line
        if not found:
            yield Text(f"no model contains {self.containing!r}" if self.containing else "no models", "dim")

    def _model(self, width: int) -> Iterator[Text]:
        row = self._row()
        assert row is not None
        reason = f" ({row['reason']})" if row["reason"] else ""
        yield Text(
            f"{row['name']} version {row['version']}: {row['state']}{reason}, from {row['source']}", "bold"
        )
        yield Text(
            f"{of.number(row['requests_per_s'])} req/s, batches of {of.number(row['batch_size'])}, "
            f"p50 {of.seconds(row['p50_s'])}, p99 {of.seconds(row['p99_s'])}, "
            f"{of.number(row['queued'])} wait, {of.number(row['in_flight'])} run, "
            f"saturation {of.part(row['saturation'])}"
        )
        yield Text(
            f"{of.number(row['failures_per_s'])} failures/s, {of.number(row['rejections_per_s'])} refusals/s"
        )
        yield Text("")
        columns = of.fitting(of.INSTANCE_COLUMNS, width)
        yield _line(of.cells(columns, None))
        for one in row["instances"]:
            yield _line(of.cells(columns, one))

    def _foot(self, height: int) -> Iterator[Text]:
        if height >= _HIGH and self._events:
            yield Text("")
            for event in self._events:
                yield Text(event_line(event), "dim")
        if self.view is View.CONFIRM and self._asked is not None:
            yield Text(f"{self._asked.question}? y yes, any other key no", "bold yellow")
        elif self.view is View.FILTER:
            yield Text(
                f"models that contain: {self.containing}▏  enter keeps it, escape shows all", "bold yellow"
            )
        else:
            yield Text(self.notice, "bold yellow") if self.notice else Text(_KEY_LINE, "dim")

    def _rows(self) -> list[of.Row]:
        if self._sample is None:
            return []
        return of.model_rows(self._sample, self.sort, reverse=self.reverse, containing=self.containing)

    def _row(self) -> of.Row | None:
        found = self._rows()
        return next((one for one in found if one["title"] == self._chosen), found[0] if found else None)


def _command(key: str, row: of.Row | None) -> KeyCommand | None:
    if key == "d":
        return KeyCommand("drain", {}, "drain the server")
    if key == "u":
        return KeyCommand("drain", {"undo": True}, "put the server back into service")
    if row is None:
        return None
    name = row["name"]
    if key == "r":
        return KeyCommand("reload", {"model": name}, f"load {name} anew")
    now = max(_by_device(row["instances"]).values(), default=0)
    wanted = now + 1 if key == "+" else now - 1
    if wanted < 1:
        return None
    return KeyCommand(
        "scale", {"counts": {name: wanted}}, f"scale {name} from {now} to {wanted} on each device"
    )


def _by_device(instances: Iterable[of.Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in instances:
        found[one["device"]] = found.get(one["device"], 0) + 1
    return found


def _heading(sample: of.Row, *, held: bool) -> Iterator[Text]:
    server = sample["server"]
    state = server["state"] if server["ready"] else f"{server['state']}, not ready"
    line = Text(f"{server['name']} {server['version']}  ", "bold")
    line.append(state, "bold green" if server["ready"] else "bold red")
    line.append(f"  up {_uptime(server['uptime_s'])}  {of.number(server['requests_per_s'])} req/s")
    line.append(f"  {of.number(server['connections'])} connections")
    if held:
        line.append("  HELD", "bold yellow")
    yield line
    for gpu in sample["gpus"]:
        memory = f"{of.nbytes(gpu.get('memory_used_nbytes'))} of {of.nbytes(gpu.get('memory_nbytes'))}"
        yield Text(f"{gpu['device']:<8} {of.part(gpu.get('utilization')):>4}  {memory}")
    if doors := sample["doors"]:
        yield Text(f"doors, connections of each: {', '.join(map(_door, doors))}")
    yield Text("")


def _door(door: of.Row) -> str:
    state = "" if door["state"] == _UP else f"{door['state']} "
    return f"{door['number']} {state}{of.number(door['connections'])}"


def _uptime(uptime_s: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if uptime_s >= size:
            return f"{uptime_s / size:.1f} {unit}"
    return f"{uptime_s:.0f} s"


def _line(made: list[tuple[str, str]], sort: str = "", heads: Iterable[str] = ()) -> Text:
    line = Text(" ").join(Text(text, style) for text, style in made)
    for (text, _), head in zip(made, heads, strict=False):
        if head.lower() == sort:
            line.highlight_words([text.strip()], "bold reverse")
    return line
