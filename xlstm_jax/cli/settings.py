"""List the settings of a run: types, defaults, descriptions, and the packaged choices that set them."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xlstm_jax.cli.shared.screen import print_error, print_out
from xlstm_jax.configs import ConfigError

if TYPE_CHECKING:
    from xlstm_jax.recipes.settings import Setting

MARKDOWN_HEAD = """# All settings

The settings of a run, as `key=value` on the command line and in recipes; `xlstm-jax settings KEY` shows one of them.
This page is the output of `xlstm-jax settings --markdown`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", nargs="?", metavar="GROUP|KEY", help="a group such as scheduler, or a setting such as scheduler.lr"
    )
    parser.add_argument("--markdown", action="store_true", help="print the documentation page of all settings")


def run(args: argparse.Namespace) -> int:
    """Print the settings and return the exit code."""
    from xlstm_jax.recipes.settings import find_settings, list_settings, settings_by_group

    try:
        if args.markdown:
            print_out(render_page())
        elif args.name is None:
            print_out(_list(list_settings()))
        else:
            found = find_settings(args.name)
            are_several = args.name in settings_by_group() or len({each.key for each in found}) > 1
            print_out(_list(found) if are_several else "\n\n".join(map(_detail, found)))
    except ConfigError as error:
        print_error(str(error))
        return 2
    return 0


def describe_group(group: str) -> str:
    """Return the choices and settings of a group, for `xlstm-jax train --help GROUP`."""
    from xlstm_jax.recipes.compose import groups
    from xlstm_jax.recipes.settings import settings_by_group, suggest

    choices, settings = groups().get(group, {}), settings_by_group().get(group, [])
    if not choices and not settings:
        raise ConfigError(f"{group}: there is no such group.{suggest(group)}")
    lines = [f"{group}=", *(f"    {choice:<16} {comment}" for choice, comment in choices.items())] if choices else []
    return "\n".join([*lines, *([_list(settings)] if settings else [])])


def render_page() -> str:
    """Return the documentation page of all settings."""
    from xlstm_jax.recipes.settings import settings_by_group

    lines = [MARKDOWN_HEAD]
    for group, settings in settings_by_group().items():
        lines.append(f"## {group}")
        for config, members in _by_config(settings):
            lines += ["", f"**{config}**", "", "| setting | type | default | description |", "|---|---|---|---|"]
            for each in members:
                cells = (f"`{each.key}`", f"`{each.type}`", f"`{each.default}`", each.description)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _list(settings: Sequence["Setting"]) -> str:
    lines = []
    for config, members in _by_config(settings):
        lines.append(f"\n{config}")
        for each in members:
            lines.append(f"  {each.key} = {each.default}  ({each.type})")
            lines.append(f"      {each.summary}{_set_in(each, 3)}")
    return "\n".join(lines).lstrip("\n")


def _detail(setting: "Setting") -> str:
    return (
        f"{setting.key}\n  {setting.description}\n  type     {setting.type}\n  default  {setting.default}\n"
        f"  config   {setting.config}" + (f"\n  set in   {', '.join(setting.set_in)}" if setting.set_in else "")
    )


def _set_in(setting: "Setting", most: int) -> str:
    if not setting.set_in:
        return ""
    more = f" and {len(setting.set_in) - most} more" if len(setting.set_in) > most else ""
    return f" Set in {', '.join(setting.set_in[:most])}{more}."


def _by_config(settings: Sequence["Setting"]) -> list[tuple[str, list["Setting"]]]:
    found: dict[str, list[Setting]] = {}
    for each in settings:
        found.setdefault(each.config, []).append(each)
    return list(found.items())
