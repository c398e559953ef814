"""The embedded world: real facts about cities and countries, one passage each, and questions that follow from them."""

from grounded_rl.data.atlas.prepare import prepare_atlas

__all__ = ["prepare_atlas"]
