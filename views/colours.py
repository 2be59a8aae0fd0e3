"""The colour of each cause of a step's time, the same in every view."""

CAUSES: dict[str, tuple[str, str]] = {
    "computing": ("#3752cd", "#5777ec"),
    "run queue": ("#b9322e", "#dd4d57"),
    "asleep": ("#7c6fb3", "#a696cf"),
    "lock or other thread": ("#592aa2", "#745fb9"),
    "disk and faults": ("#de7616", "#f5a268"),
    "expert load": ("#1da1a8", "#5acdc7"),
    "submission": ("#753055", "#a45270"),
    "queue": ("#656307", "#878717"),
    "transport": ("#237095", "#5194b2"),
    "accelerator": ("#6b9a4b", "#7bbf48"),
    "completion": ("#bf74cd", "#eb9bf3"),
    "stopped": ("#6c7055", "#889881"),
    "tracing itself": ("#8e1578", "#b9389b"),
    "residual": ("#958c8e", "#bdb4a8"),
}
"""Cause → colour on the light and on the dark page, in the order in which causes are stacked.

Each has a contrast of at least 3 with its page, and causes at most two apart in the order differ for every kind of colour
vision (tests/test_views_colours.py).
"""


def style_variables() -> str:
    """CSS variables `--cause-run-queue` and so on, for both themes."""
    themes = [
        "".join(f" --cause-{cause.replace(' ', '-')}: {colours[theme]};" for cause, colours in CAUSES.items()) for theme in (0, 1)
    ]
    return f':root {{{themes[0]} }}\n:root[data-theme="dark"] {{{themes[1]} }}\n'
