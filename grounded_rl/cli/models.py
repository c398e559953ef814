"""Models by name: what the Hub, a folder or this package has."""

from __future__ import annotations

from pathlib import Path

from grounded_rl.errors import ConfigurationError

ATLAS_POLICY = "atlas-policy"
"""Name of the tiny policy that ships with the package."""


def resolve_model(name: str) -> str:
    """
    Path or Hub name of a model.

    Args:
        name (`str`):
            `"atlas-policy"` for the policy in the package, a folder, or a name on the Hub.

    Returns:
        `str`: What `from_pretrained` takes.

    Raises:
        `ConfigurationError`: If `name` looks like a path and no such folder exists.
    """
    if name == ATLAS_POLICY:
        from grounded_rl.data import atlas

        return str(Path(atlas.__file__).parent / "policy")
    path = Path(name)
    looks_like_path = path.is_absolute() or name.startswith(".") or name.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise ConfigurationError(
            f"`model` must be a folder, a name on the Hub or `{ATLAS_POLICY}`: got {name!r}, which does not exist. "
            "Check the path."
        )
    return name
