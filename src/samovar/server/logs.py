"""The log of the server: lines for people, or one JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; anything else was given as `extra`."""


class JsonFormatter(logging.Formatter):
    """A record with its extra fields as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def set_up_logs(log_format: str, *, quiet: bool = False) -> None:
    """Write the log to stderr: every request, or errors only."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(handlers=[handler], force=log_format == "json")
    logging.getLogger("samovar.server").setLevel(logging.WARNING if quiet else logging.INFO)
