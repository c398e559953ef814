"""Import of optional dependencies, with a message that says how to get them."""

from __future__ import annotations

import importlib
from types import ModuleType

from grounded_rl.errors import MissingDependencyError


def require(package: str, extra: str, *, needed_by: str) -> ModuleType:
    """
    Import an optional package or say which extra brings it.

    Args:
        package (`str`):
            Name to import, for instance `"faiss"`.
        extra (`str`):
            Extra of this distribution that installs it, for instance `"dense"`.
        needed_by (`str`):
            What the user asked for, as they typed it, for instance `"retrieval_backend: dense"`.

    Returns:
        `module`: The imported module.

    Raises:
        `MissingDependencyError`: If the package cannot be found.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != package.split(".")[0]:
            raise
        raise MissingDependencyError(
            f"`{needed_by}` needs the package `{package}`: run `pip install 'grounded-rl[{extra}]'`."
        ) from error
