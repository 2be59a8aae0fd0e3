"""The colours of causes: readable on both pages, and different for every kind of colour vision."""

import itertools

import numpy as np
import pytest

from analyzer.questions.causes import CAUSES as ANALYZED
from views.colours import CAUSES, style_variables

PANELS = ("#ffffff", "#1a2029")
LEAST_CONTRAST, LEAST_DIFFERENCE, NEIGHBOURS = 3, 0.09, 2
VISION = {
    "normal": np.eye(3),
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Linear RGB as seen (Machado, Oliveira and Fernandes 2009, severity 1)."""
TO_CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
TO_CONES += [[0.0883024619, 0.2817188376, 0.6299787005]]
TO_LAB = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
TO_LAB += [[0.0259040371, 0.7827717662, -0.8086757660]]


def linear(colour: str) -> np.ndarray:
    """Linear RGB of a colour."""
    part = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    """Relative luminance by WCAG."""
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def oklab(colour: str, vision: str) -> np.ndarray:
    """A colour as seen, in Oklab: distances are about equally visible."""
    seen = np.clip(np.asarray(VISION[vision]) @ linear(colour), 0, 1)
    return np.asarray(TO_LAB) @ np.cbrt(np.asarray(TO_CONES) @ seen)


def test_every_cause_has_a_colour_in_the_order_of_the_analyzer() -> None:
    assert [cause for cause in CAUSES if cause in ANALYZED] == list(ANALYZED)


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_stand_out_from_their_page(theme: int) -> None:
    panel = luminance(PANELS[theme])
    for cause, colours in CAUSES.items():
        low, high = sorted((panel, luminance(colours[theme])))
        assert (high + 0.05) / (low + 0.05) >= LEAST_CONTRAST, cause


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("vision", VISION)
def test_neighbouring_causes_differ_for_every_colour_vision(vision: str, theme: int) -> None:
    seen = [oklab(colours[theme], vision) for colours in CAUSES.values()]
    for (a, one), (b, other) in itertools.combinations(enumerate(seen), 2):
        if b - a <= NEIGHBOURS:
            assert np.linalg.norm(one - other) >= LEAST_DIFFERENCE, (list(CAUSES)[a], list(CAUSES)[b])


def test_the_style_has_every_colour_of_both_themes() -> None:
    light, dark = style_variables().splitlines()
    assert "--cause-run-queue: " + CAUSES["run queue"][0] in light and "--cause-run-queue: " + CAUSES["run queue"][1] in dark
    assert light.count("--cause-") == dark.count("--cause-") == len(CAUSES)
