"""The argument parser of every subcommand: one clear line on bad input instead of a usage dump."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn

from grounded_rl.errors import ConfigurationError


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The known name most like `name`, or `None` if none is close."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Raw descriptions, with the column of explanations as wide as the longest subcommand needs."""

    def add_argument(self, action: argparse.Action) -> None:
        """Count the deeper indentation of subcommands, which argparse leaves out."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            widest = max((len(name) for name in action.choices), default=0)
            indent = self._current_indent + self._indent_increment
            self._action_max_length = max(self._action_max_length, widest + indent)


class CommandParser(argparse.ArgumentParser):
    """
    `argparse.ArgumentParser` that raises [`ConfigurationError`] instead of exiting, keeps the line breaks of its
    description and epilog, and accepts no abbreviated options (a recipe's key must never be mistaken for one).
    """

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ConfigurationError(f"{message}. See `{self.prog} --help`.")

    @property
    def option_names(self) -> list[str]:
        """Every long option of this command, dashes included."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def refuse(self, arguments: list[str]) -> NoReturn:
        """Raise for arguments that no option took, naming the nearest option."""
        first = arguments[0]
        if not first.startswith("-"):
            self.error(f"`{first}` must follow an option or be left out: `{self.prog}` takes no such argument")
        option = first.split("=", 1)[0]
        match = nearest(option, self.option_names)
        hint = f"Did you mean `{match}`?" if match else f"See `{self.prog} --help`."
        raise ConfigurationError(f"`{option}` must be an option of `{self.prog}`. {hint}")
