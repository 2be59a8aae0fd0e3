"""One self-contained HTML page with styles, scripts and data, readable from disk without a network.

Data from the traced program is never part of the markup: it is embedded as JSON in which `<` cannot occur, and the page's
scripts insert it only as text nodes.
"""

import base64
import gzip
import html
import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from moescope.answers import json_value
from moescope.scratch import replaced_file
from views import colours

LARGEST = (1 << 53) - 1
"""JavaScript's numbers hold integers exactly up to this."""
SCRIPTS = {
    "report": ("common", "time_bars", "report"),
    "profdag": ("common", "profdag_causes", "profdag"),
    "flame": ("common", "flame"),
}
"""Page → its scripts of views/static."""
TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{stamp}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body class="{name}">
<noscript>This page draws itself with JavaScript, all of which is inside the file.</noscript>
{assets}
<script>
{script}
</script>
</body>
</html>
"""


def static_file(name: str) -> str:
    """A file of views/static."""
    return files("views").joinpath("static", name).read_text(encoding="utf-8")


@lru_cache(2)
def pack_bytes(data: bytes) -> str:
    """Bytes as gzip in base64. `unpack` of static/common.js is the inverse."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode("ascii")


def packed_asset(name: str, data: bytes) -> str:
    """A packed asset that the page's scripts look up by id."""
    return f'<script type="application/octet-stream" id="asset-{name}">{pack_bytes(data)}</script>'


def plotly_array(values: np.ndarray) -> dict[str, Any]:
    """A NumPy array in Plotly's base64 format."""
    code = {"float64": "f8", "float32": "f4", "int32": "i4", "uint16": "u2", "uint8": "u1"}[str(values.dtype)]
    shape = ", ".join(str(n) for n in values.shape)
    return {"dtype": code, "bdata": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii"), "shape": shape}


def write_page(
    path: Path, name: str, title: str, data: Any, assets: dict[str, bytes] | None = None, stamp: str = "MoEScope"
) -> int:
    """Write the page `name` (static/NAME.js and .css) with its data and the stamp of its recording; returns the bytes written."""
    document = json.dumps(json_value(data, LARGEST), separators=(",", ":"), allow_nan=False).encode()
    page = TEMPLATE.format(
        title=html.escape(title),
        stamp=stamp,
        name=name,
        style=static_file("common.css") + colours.style_variables() + static_file(f"{name}.css"),
        assets="\n".join(packed_asset(key, value) for key, value in ({"data": document} | (assets or {})).items()),
        script="".join(static_file(f"{part}.js") for part in SCRIPTS[name]),
    ).encode(errors="replace")
    with replaced_file(path) as partial:
        partial.write_bytes(page)
    return len(page)
