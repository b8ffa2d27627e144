"""The screen of ``gpuserve top`` and the meaning of its keys. Pure: no terminal, no server, no clock.

::

    MODELS ──enter──► MODEL       the list; one model with its instances
       │ /               │
    FILTER            + - r d u   ──► CONFIRM ──y──► a command for the server
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from rich.text import Text

from gpuserve.cli.live.status_view import event_line
from gpuserve.cli.live.top_columns import (
    INSTANCE_COLUMNS,
    MODEL_COLUMNS,
    SORTS,
    Row,
    bytes_text,
    count_text,
    duration_text,
    fitting_columns,
    model_rows,
    percent_text,
    table_cells,
)
from gpuserve.core.states import StepTable

#: Names of keys by the bytes that a terminal sends.
KEYS: Final[Mapping[str, str]] = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[1~": "home", "g": "home",
    "\x1b[F": "end", "\x1b[4~": "end", "G": "end", "\r": "enter", "\n": "enter", "\x1b[C": "enter",
    "\x1b[D": "escape", "\x1b": "escape", "\x7f": "backspace", "\x08": "backspace",
}  # fmt: skip
_HELP: Final = (
    "up, down, j, k, page keys   choose a model",
    "enter, right                show its instances",
    "escape, left                back",
    "s, S                        sort by the next column, the other way round",
    "/                           show models whose name contains a text",
    "+, -                        scale the model by one instance on each device",
    "r                           reload the model; the old instances serve meanwhile",
    "d, u                        drain the server, put it back into service",
    "p                           pause the screen, or continue",
    "q                           quit; the server continues",
)
_KEY_LINE: Final = "enter instances  s sort  / filter  +- scale  r reload  d drain  p pause  h help  q quit"
_MAX_EVENTS: Final = 4
_UP: Final = "UP"
#: The least height of a terminal that shows events.
_EVENTS_MIN_HEIGHT: Final = 18


class View(enum.Enum):
    """The views of the screen, each with keys of its own."""

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
    """A command that a key requests: a command for the server with its arguments, or "quit"."""

    verb: str
    arguments: dict[str, Any]
    question: str = ""


QUIT: Final = KeyCommand("quit", {})


class Screen:
    """The state of the screen: the newest sample, the chosen model, and the view."""

    def __init__(self, sort: str = "req/s", containing: str = "") -> None:
        self.view = View.MODELS
        self.sort = sort
        self.reverse = False
        self.containing = containing
        #: The message in the last line: the outcome of a command, or a lost server.
        self.notice = ""
        self._back = View.MODELS
        self._sample: Row | None = None
        self._is_paused = False
        self._chosen = ""
        self._first = 0
        self._pending: KeyCommand | None = None
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_MAX_EVENTS)

    # ---- input ------------------------------------------------------------------------

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Process an event; the screen shows the newest sample."""
        if event["kind"] != "sample":
            self._events.append(event)
        elif not self._is_paused:
            self._sample = event

    def press_key(self, raw: str) -> KeyCommand | None:
        """Process a key as the terminal sent it; return a command for the server, QUIT, or None."""
        if self.view is View.FILTER:
            self._write_filter(raw)
            return None
        key = KEYS.get(raw, raw)
        if self.view is View.CONFIRM:
            command, self._pending = self._pending, None
            self._change_view(self._back)
            if key.lower() != "y" or command is None:
                self.notice = "nothing was done"
                return None
            self.notice = f"asked: {command.question} …"
            return command
        self.notice = ""
        if self.view is View.HELP:
            self._change_view(self._back)
            return None
        return self._run_key(key)

    # ---- keys ---------------------------------------------------------------------------------

    def _run_key(self, key: str) -> KeyCommand | None:
        match key:
            case "q" if self.view is View.MODELS:
                return QUIT
            case "q" | "escape" if self.view is View.MODEL:
                self._change_view(View.MODELS)
            case "up" | "down" | "page up" | "page down" | "home" | "end":
                self._choose(key)
            case "enter" if self.view is View.MODELS and self._row() is not None:
                self._change_view(View.MODEL)
            case "/" if self.view is View.MODELS:
                self._change_view(View.FILTER)
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            case "S":
                self.reverse = not self.reverse
            case "p":
                self._is_paused = not self._is_paused
            case "h" | "?":
                self._back = self.view
                self._change_view(View.HELP)
            case "+" | "-" | "r" | "d" | "u":
                self._request_confirmation(key)
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
            self._change_view(View.MODELS)
        elif key == "escape":
            self.containing = ""
            self._change_view(View.MODELS)
        elif key == "backspace":
            self.containing = self.containing[:-1]
        elif key.isprintable() and len(key) == 1:
            self.containing += key

    def _request_confirmation(self, key: str) -> None:
        row = self._row()
        command = _key_command(key, row)
        if command is None:
            few = "the model has only one instance on a device"
            self.notice = "no model is chosen" if row is None else few
            return
        self._pending, self._back = command, self.view
        self._change_view(View.CONFIRM)

    def _change_view(self, view: View) -> None:
        self.view = _STEPS.step(self.view, view)

    # ---- drawing --------------------------------------------------------------------------

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the lines of the screen, ``height`` at most, none wider than ``width``."""
        if self._sample is None:
            made = [Text(self.notice or "waiting for the server …")]
        elif self.view is View.HELP:
            ending = [Text(""), Text("press any key to go back", "dim")]
            made = [Text("Keys", "bold"), *map(Text, _HELP), *ending]
        else:
            made = [*self._layout(self._sample, width, height)]
        for one in made:
            one.truncate(width, overflow="ellipsis")
        return made[:height]

    def report(self, width: int) -> list[Text]:
        """Return the table of all models, without keys and events."""
        assert self._sample is not None
        models = self._model_list(width, len(self._rows()) + 1, marked=False)
        return [*_header(self._sample, is_paused=False), *models]

    def _layout(self, sample: Row, width: int, height: int) -> Iterator[Text]:
        head = list(_header(sample, is_paused=self._is_paused))
        foot = list(self._footer(height))
        body = height - len(head) - len(foot)
        yield from head
        view = self._back if self.view is View.CONFIRM else self.view
        is_one = view is View.MODEL and self._row() is not None
        shown = list(self._model_details(width) if is_one else self._model_list(width, body))[:body]
        yield from shown
        yield from [Text("")] * (body - len(shown))
        yield from foot

    def _model_list(self, width: int, height: int, *, marked: bool = True) -> Iterator[Text]:
        found = self._rows()
        columns = fitting_columns(MODEL_COLUMNS, width)
        yield _line(table_cells(columns, None), self.sort, [one.head for one in columns])
        titles = [str(one["title"]) for one in found]
        at = titles.index(self._chosen) if self._chosen in titles else 0
        room = max(1, height - 1)
        self._first = min(max(self._first, at - room + 1, 0), at, max(0, len(found) - room))
        for number, row in enumerate(found[self._first : self._first + room], self._first):
            line = _line(table_cells(columns, row))
            if marked and number == at:
                line.stylize("reverse")
            yield line
        if not found:
            yield Text(f"no model contains {self.containing!r}" if self.containing else "no models", "dim")

    def _model_details(self, width: int) -> Iterator[Text]:
        row = self._row()
        assert row is not None
        reason = f" ({row['reason']})" if row["reason"] else ""
        head = f"{row['name']} version {row['version']}: {row['state']}{reason}, from {row['source']}"
        yield Text(head, "bold")
        yield Text(
            f"{count_text(row['requests_per_s'])} req/s, batches of {count_text(row['batch_size'])}, "
            f"p50 {duration_text(row['p50_s'])}, p99 {duration_text(row['p99_s'])}, "
            f"{count_text(row['queued'])} queued, {count_text(row['in_flight'])} running, "
            f"saturation {percent_text(row['saturation'])}"
        )
        if row.get("steps_per_s") is not None:
            steps, responses = count_text(row["steps_per_s"]), count_text(row["responses_per_s"])
            first = duration_text(row["first_p50_s"])
            yield Text(f"{steps} steps/s, {responses} responses/s, first response p50 {first}")
        failures, rejections = count_text(row["failures_per_s"]), count_text(row["rejections_per_s"])
        yield Text(f"{failures} failures/s, {rejections} rejections/s")
        groups = row.get("shape_groups") or 0
        if groups > 1 and (row["queued"] or 0) >= 4 * (row["batch_size"] or 1):
            yield Text(
                f"mean batch {count_text(row['batch_size'])} with {count_text(row['queued'])} waiting: "
                f"requests differ in shape ({groups} shapes); see ragged inputs in docs/how-to/batching.md",
                "yellow",
            )
        yield Text("")
        columns = fitting_columns(INSTANCE_COLUMNS, width)
        yield _line(table_cells(columns, None))
        for one in row["instances"]:
            yield _line(table_cells(columns, one))

    def _footer(self, height: int) -> Iterator[Text]:
        if height >= _EVENTS_MIN_HEIGHT and self._events:
            yield Text("")
            for event in self._events:
                yield Text(event_line(event), "dim")
        if self.view is View.CONFIRM and self._pending is not None:
            yield Text(f"{self._pending.question}? y yes, any other key no", "bold yellow")
        elif self.view is View.FILTER:
            keys = "enter keeps the filter, escape shows all"
            yield Text(f"models that contain: {self.containing}▏  {keys}", "bold yellow")
        else:
            yield Text(self.notice, "bold yellow") if self.notice else Text(_KEY_LINE, "dim")

    def _rows(self) -> list[Row]:
        if self._sample is None:
            return []
        return model_rows(self._sample, self.sort, reverse=self.reverse, containing=self.containing)

    def _row(self) -> Row | None:
        found = self._rows()
        return next((one for one in found if one["title"] == self._chosen), found[0] if found else None)


def _key_command(key: str, row: Row | None) -> KeyCommand | None:
    if key == "d":
        return KeyCommand("drain", {}, "drain the server")
    if key == "u":
        return KeyCommand("drain", {"undo": True}, "put the server back into service")
    if row is None:
        return None
    name = row["name"]
    if key == "r":
        return KeyCommand("reload", {"model": name}, f"reload {name}")
    now = max(Counter(one["device"] for one in row["instances"]).values(), default=0)
    wanted = now + 1 if key == "+" else now - 1
    if wanted < 1:
        return None
    question = f"scale {name} from {now} to {wanted} on each device"
    return KeyCommand("scale", {"counts": {name: wanted}}, question)


def _header(sample: Row, *, is_paused: bool) -> Iterator[Text]:
    server = sample["server"]
    state = server["state"] if server["ready"] else f"{server['state']}, not ready"
    line = Text(f"{server['name']} {server['version']}  ", "bold")
    line.append(state, "bold green" if server["ready"] else "bold red")
    up_s = server["uptime_s"]
    units = ((86_400, "d"), (3600, "h"), (60, "min"))
    up = next((f"{up_s / size:.1f} {unit}" for size, unit in units if up_s >= size), f"{up_s:.0f} s")
    line.append(f"  up {up}  {count_text(server['requests_per_s'])} req/s")
    line.append(f"  {count_text(server['connections'])} connections")
    if is_paused:
        line.append("  PAUSED", "bold yellow")
    yield line
    for gpu in sample["gpus"]:
        memory = f"{bytes_text(gpu.get('memory_used_nbytes'))} of {bytes_text(gpu.get('memory_nbytes'))}"
        yield Text(f"{gpu['device']:<8} {percent_text(gpu.get('utilization')):>4}  {memory}")
    shown = []
    for one in sample["doors"]:
        state = "" if one["state"] == _UP else f"{one['state']} "
        shown.append(f"{one['number']} {state}{count_text(one['connections'])}")
    if shown:
        yield Text(f"connections of each ingress process: {', '.join(shown)}")
    yield Text("")


def _line(made: list[tuple[str, str]], sort: str = "", heads: Iterable[str] = ()) -> Text:
    line = Text(" ").join(Text(text, style) for text, style in made)
    for (text, _), head in zip(made, heads, strict=False):
        if head.lower() == sort:
            line.highlight_words([text.strip()], "bold reverse")
    return line
