"""
Colours of diagnosis types and segments, the same in plots, terminal and viewer.

From the palette of Okabe and Ito, which stays apart under the common colour-vision deficiencies. Nothing is told by
colour alone: every use carries its letter or name.
"""

from __future__ import annotations

TYPE_COLORS: dict[str, str] = {"A": "#009E73", "B": "#E69F00", "C": "#8A9099", "D": "#CC79A7"}
"""Diagnosis type to colour."""

SEGMENT_COLORS: dict[str, str] = {
    "v_search": "#0072B2",
    "r_search": "#D55E00",
    "answer": "#7A5CCB",
    "none": "#8A9099",
}
"""Segment to colour."""

TYPE_MEANINGS: dict[str, str] = {
    "A": "evidence found, answer right",
    "B": "evidence found, answer wrong",
    "C": "no evidence, answer wrong",
    "D": "no evidence, answer right",
}
"""Diagnosis type in words."""

SEGMENT_LABELS: dict[str, str] = {
    "v_search": "useful search",
    "r_search": "residual search",
    "answer": "answer",
    "none": "unlabelled",
}
"""Segment in words: a search up to the first hit, any other search or malformed call, the final answer, a cut turn."""

BEFORE_COLOR = "#8A9099"
AFTER_COLOR = "#0072B2"
