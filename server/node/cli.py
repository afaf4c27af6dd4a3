"""Options declared once: the fields of a dataclass make the parser, its values, and the table of the documents."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from server import __version__


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Options = TypeVar("Options", bound=_Dataclass)


@dataclass(frozen=True, eq=False)
class OneOf:
    """Options of a group of which only one may be given, or, if ``required``, exactly one. None is needed where the
    option ``unless`` (a field's name) is given.
    """

    group: str
    required: bool = False
    unless: str = ""


def option(
    group: str | OneOf,
    help: str,  # noqa: A002
    *,
    default: Any = None,
    flag: str | None = None,
    **arguments: Any,
) -> Any:
    """A dataclass field that is an option, listed under ``group`` in the help. Its ``flag`` is the field's name, unless
    it is given.

    One with the default ``()`` may be repeated, one with the default False is a switch. ``arguments`` are more of those
    that :meth:`argparse.ArgumentParser.add_argument` takes.
    """
    if default == ():
        arguments |= {"action": "append", "default": []}
    elif default is False:
        arguments |= {"action": "store_true", "default": False}
    else:
        arguments["default"] = default
    return field(default=default, metadata={"flag": flag, "group": group, "help": help, "arguments": arguments})


def parse(options: type[Options], prog: str, description: str, argv: Sequence[str] | None) -> Options:
    """The values of a command line (None: that of this process).

    What is wrong with it ends the process with one sentence and exit code 2.
    """
    parser = _Parser(prog=prog, description=description, formatter_class=_Help, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    add_options(parser, fields(options))
    values = vars(parser.parse_args(argv))
    for group, members in _conditional_groups(fields(options)).items():
        if not values[group.unless] and not any(values[one.name] for one in members):
            names = " ".join(_flag(one) for one in members)
            parser.error(f"one of the arguments {names} is required")
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _conditional_groups(declared: Iterable[Field[Any]]) -> dict[OneOf, list[Field[Any]]]:
    """The groups of which one option is required unless another is given, which argparse cannot say."""
    groups: dict[OneOf, list[Field[Any]]] = {}
    for one in declared:
        group = one.metadata["group"]
        if isinstance(group, OneOf) and group.required and group.unless:
            groups.setdefault(group, []).append(one)
    return groups


def _flag(declared: Field[Any]) -> str:
    flag: str = declared.metadata["flag"] or "--" + declared.name.replace("_", "-")
    return flag


def add_options(parser: argparse.ArgumentParser, declared: Iterable[Field[Any]]) -> list[argparse.Action]:
    """Adds every declared option to its group, in the order of their declaration."""
    groups: dict[str | OneOf, argparse._ActionsContainer] = {}
    actions = []
    for one in declared:
        group = one.metadata["group"]
        title = group.group if isinstance(group, OneOf) else group
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if group not in groups:
            groups[group] = groups[title].add_mutually_exclusive_group(required=group.required and not group.unless)
        arguments = one.metadata["arguments"]
        actions.append(groups[group].add_argument(_flag(one), dest=one.name, help=one.metadata["help"], **arguments))
    return actions


class _Parser(argparse.ArgumentParser):
    """Reports an error in one sentence, and an unknown option before a missing one."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        words = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        for name in (word.partition("=")[0] for word in words):
            if name.startswith("--") and name != "--" and name not in known:
                self.error(f"there is no option {name}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every default, except where there is none to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS, []):
            return action.help
        return super()._get_help_string(action)
