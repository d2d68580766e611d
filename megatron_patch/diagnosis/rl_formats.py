"""Readers of the four kinds of log that verl writes: console text, its file logger, TensorBoard, wandb offline.

Each gives (step, {metric: value}) in the order of the file, and counts what it could not read: a run that was killed leaves
half a line or half a record, and that must neither end the report nor pass unseen.
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Row = tuple[int, dict[str, float]]


@dataclass
class Reading:
    """What one file holds."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    unreadable: int = 0
    """Lines or records that could not be read, whole or in part."""
    first_unreadable: str | None = None
    """Where the first of them stands, and why."""

    def complain(self, place: str, reason: str) -> None:
        """Count something unreadable."""
        self.unreadable += 1
        self.first_unreadable = self.first_unreadable or f"{place}: {reason}"

    def add(self, step: int, values: dict[str, float]) -> None:
        """Append a row; values of the step that was last added join it (TensorBoard has an event for each value)."""
        if not values:
            return
        if self.rows and self.rows[-1][0] == step:
            self.rows[-1][1].update(values)
        else:
            self.rows.append((step, values))


# --- console ---------------------------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Not `global_step:34 - `, a metric of the same line; a progress bar may stand before it, Ray's prefix and a logger's too.
_STEP = re.compile(r"(?<![A-Za-z_/.-])step:(\d+) - ")
# A float of Python or numpy: 0.5, 1e-06, -inf, nan, np.float64(0.5), and 0.500 of old releases. What follows the last
# value of a line (a progress bar, Ray's "[repeated 2x across cluster]") is not part of it.
_NUMBER = r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|inf|nan)"
_VALUE = re.compile(rf"(?:np\.\w+\(({_NUMBER})\)|({_NUMBER})|(True|False))")


def read_console(path: Path) -> Reading:
    """Lines `step:12 - actor/grad_norm:0.12 - ...` among everything else that a console shows."""
    reading = Reading(path)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, raw in enumerate(file, 1):
            # A progress bar redraws itself with carriage returns: each drawing is a line of its own.
            drawings = raw.split("\r")
            for drawing in drawings:
                if "step:" in drawing:
                    cut = drawing is drawings[-1] and not raw.endswith("\n")
                    _read_console_line(_ANSI.sub("", drawing), cut, f"line {number}", reading)
    return reading


def _read_console_line(line: str, cut: bool, place: str, reading: Reading) -> None:
    """The steps of one line: one, or several where a line end got lost between processes. `cut`: the file ends here."""
    marks = list(_STEP.finditer(line))
    for mark, after in zip(marks, [*marks[1:], None]):
        end = after.start() if after else len(line)
        pieces = line[mark.end() : end].strip().split(" - ")
        if cut and end == len(line):  # a number may have lost digits, and would be taken for a smaller one
            reading.complain(place, "the file ends within it; its last value is left out")
            pieces.pop()
        values: dict[str, float] = {}
        broken = None
        for piece in pieces:
            name, value = _console_value(piece, last=piece is pieces[-1])
            if value is None:
                broken = broken or piece
            else:
                values[name] = value
        if broken is not None:
            reading.complain(place, f"no name:value in {broken[:60]!r}")
        reading.add(int(mark[1]), values)


def _console_value(piece: str, last: bool) -> tuple[str, float | None]:
    """Name and number of `name:number`; a name may hold colons. Only behind the last one of a line may other text follow."""
    for colon in re.finditer(":", piece):
        match = _VALUE.match(piece, colon.end())
        if match and (last or match.end() == len(piece)):
            numpy, plain, boolean = match.groups()
            return piece[: colon.start()].strip(), float(boolean == "True") if boolean else float(numpy or plain)
    return piece, None


# --- verl's file logger ----------------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> Reading:
    """`{"step": 12, "data": {...}}` a line. It has no NaN: a non-finite number was written as null, and is NaN again here."""
    reading = Reading(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                step, data = int(row["step"]), dict(row["data"])
            except (ValueError, TypeError, KeyError) as error:
                reading.complain(f"line {number}", f"not a verl row ({type(error).__name__})")
                continue
            reading.add(step, {name: value for name, item in data.items() if (value := _scalar(item)) is not None})
    return reading


def _scalar(item: object) -> float | None:
    """A number, NaN for null and for text such as "NaN" or "Infinity"; None for anything else, e.g. a table."""
    if item is None:
        return math.nan
    if isinstance(item, str):
        return {"nan": math.nan, "infinity": math.inf, "-infinity": -math.inf}.get(item.lower())
    return float(item) if isinstance(item, bool | int | float) else None


# --- TensorBoard -----------------------------------------------------------------------------------------------------------


def read_tensorboard(path: Path) -> Reading:
    """Scalars of an event file, by TensorBoard's own record reader, which checks each record's sum."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub import errors
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reading, reader, number = Reading(path), PyRecordReader_New(str(path)), 0
    while True:
        number += 1
        try:
            reader.GetNext()
        except errors.OutOfRangeError:
            return reading
        except errors.DataLossError:
            reading.complain(f"event {number}", "the record is cut off or damaged; nothing can be read after it")
            return reading
        event = Event.FromString(reader.record())
        for value in event.summary.value:
            number_ = _event_scalar(value)
            if number_ is not None:
                reading.add(event.step, {value.tag: number_})


def _event_scalar(value) -> float | None:
    """The number of a summary's value, in the old form or as a tensor; None for text, images and histograms."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.metadata.plugin_data.plugin_name == "scalars" and len(value.tensor.float_val) == 1:
        return float(value.tensor.float_val[0])
    return None


# --- wandb -----------------------------------------------------------------------------------------------------------------

_WANDB_START, _BLOCK, _HEADER = b":W&B", 32768, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_wandb(path: Path) -> Reading:
    """History of a run-*.wandb transaction log, as `wandb` itself writes it when offline.

    wandb's own messages decode the records. The frame around them is LevelDB's log format (32 KiB blocks, records of
    checksum, length, type) behind 7 bytes; it is read here since recent releases of wandb no longer have a reader in Python.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    reading = Reading(path)
    for data in _wandb_records(path.read_bytes(), reading):
        record = Record()
        try:
            record.ParseFromString(data)
        except Exception as error:  # the message class differs between the implementations of protobuf
            reading.complain("a record", type(error).__name__)
            continue
        if record.WhichOneof("record_type") != "history":
            continue
        values: dict[str, float] = {}
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            value = _scalar(json.loads(item.value_json))
            if value is not None:
                values[name] = value
        step = int(values.get("_step", record.history.step.num))
        reading.add(step, {name: value for name, value in values.items() if not name.startswith("_")})
    return reading


def _wandb_records(data: bytes, reading: Reading) -> Iterator[bytes]:
    """Whole records; a damaged one is counted and skipped, a cut one ends the file."""
    position, parts, within = 7, b"", False
    while position + _HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        checksum, length, kind = _HEADER.unpack_from(data, position)
        if left < _HEADER.size or checksum == length == kind == 0:  # the writer fills a block's end with zeros
            position += left
            continue
        start, end = position + _HEADER.size, position + _HEADER.size + length
        if end > len(data):
            break
        if end - position > left or zlib.crc32(data[start - 1 : end]) != checksum:  # the sum covers the kind, too
            reading.complain(f"byte {position}", "wrong checksum")
            position, parts, within = (end if end - position <= left else position + left), b"", False
            continue
        position = end
        parts = data[start:end] if kind in (_FULL, _FIRST) else parts + data[start:end]
        within = kind in (_FIRST, _MIDDLE)
        if kind in (_FULL, _LAST):
            yield parts
    if within or position < len(data):
        reading.complain(f"byte {position}", "the file ends within a record")


# --- which is it -----------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path], Reading]] = {
    "jsonl": read_jsonl,
    "wandb": read_wandb,
    "tensorboard": read_tensorboard,
    "console": read_console,
}
"""By name, those that keep all digits first: of two that cover the same steps the first is read."""

_TEXT = {".log", ".txt", ".out", ".err", ""}


def detect(path: Path, *, certain: bool = False) -> str | None:
    """The format of a file, None if it is none of verl's.

    Args:
        path: a file.
        certain: the user named this very file, so text of any suffix is taken for a console's.
    """
    if "tfevents" in path.name:
        return "tensorboard"
    with path.open("rb") as file:
        start = file.read(65536)
    if start.startswith(_WANDB_START):
        return "wandb"
    if any(_is_row(line) for line in start.splitlines()[:20]):
        return "jsonl"
    if b"\0" not in start and (certain or path.suffix in _TEXT):
        return "console"
    return None


def _is_row(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("data"), dict)
