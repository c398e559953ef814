"""
Replay of recorded outputs of other implementations: `python -m tests.oracles FOLDER`.

An oracle file is JSON with a `method` (its format), where the numbers come from, a note about the quirks they keep,
and `cases`. One function per format recomputes every case with this package; to add a format, write a function and
register it in `tests.oracles.registry`.
"""
