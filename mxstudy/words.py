"""Check the words of a command one by one, before Hydra composes a config from them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from hydra.errors import HydraException

from mxstudy.compat.hydra import first_value, text_value
from mxstudy.config.conf_folders import STARTS
from mxstudy.reader import ConfigError, one_line, require, suggest

TEXTS = {"prompt"}  # keys whose value is any text, taken literally
HELP = {"-h", "--help"}
MULTIRUN = {"-m", "--multirun"}
HYDRA_ONLY = {"-c", "--cfg", "-i", "--info", "--hydra-help"}
VALUED = {"-c", "--cfg", "-i", "--info", "-cd", "--config-dir"}
OPTIONS = HELP | MULTIRUN | HYDRA_ONLY | VALUED | {"--resolve"}
COMMANDS = {"help": "--help", "status": "+launch=status", "cancel": "+launch=cancel", "retry": "+launch=retry"}
HYDRA_KEYS = ("hydra.launcher", "hydra.sweeper", "hydra.searchpath")  # what is read of Hydra's own config
ONE_EACH = ("experiment", "sweep")  # groups of which a command has one choice
SEVERAL = r"\s\+*[\w./]+="  # what no value contains outside of quotes
SHOWN = 60  # characters of a word in a message


def check_words(arguments: Sequence[str], groups: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a word that is not an override or option, is given twice, or that Hydra cannot read.

    `groups`: every config group with its choices.
    """
    encoding = sys.getfilesystemencoding()
    require(encoding == "utf-8", f"LC_ALL: file names are in {encoding} here; set LC_ALL=C.UTF-8, or PYTHONUTF8=1")
    check_shape(arguments, groups)
    for line in overrides_in(arguments):
        try:
            key, value = first_value(line)
        except (HydraException, ValueError) as error:
            several = "several overrides in one word; make each a word of its own"
            advice = f"text with other signs than a-z 0-9 _ - . / stands in quotes: '{key_of(line)}=\"...\"'"
            unread = several if re.search(SEVERAL, line) else f"cannot be read ({short(one_line(error))}); {advice}"
            raise ConfigError(f"{short(line)}: {unread}") from None
        check_hydra(line)
        if key in ONE_EACH and "," in line:
            raise ConfigError(f"{short(line)}: a command has one {key}; give each a command of its own")
        if key in groups and not isinstance(value, str | list):
            raise ConfigError(f"{short(line)}: no such choice; {suggest(line.partition('=')[2], groups[key])}")


def check_hydra(line: str) -> None:
    """Raise ConfigError for a setting of Hydra that nothing here reads, such as hydra.run.dir."""
    key = key_of(line)
    require(
        not key.startswith("hydra.") or key.startswith(HYDRA_KEYS),
        f"{short(line)}: nothing reads it; runs_dir=FOLDER says where runs are, hydra/launcher=NAME how they start",
    )


def as_text(word: str) -> str:
    """Return a word of TEXTS with its value in quotes, so that Hydra reads it literally; a quoted value stays.

    So `prompt='def quicksort('` needs no second pair of quotes, and `prompt='"a","b"'` is a sweep.
    """
    key, equals, text = word.partition("=")
    if key not in TEXTS or not equals or text.startswith(('"', "'")):
        return word
    quotes = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', r"\""), text)
    escaped = quotes.replace("${", r"\${")  # otherwise OmegaConf would look for a key of that name
    return f'{key}="{escaped}"'


def unquoted(word: str) -> str:
    """Return KEY=VALUE with the text that a training would read as VALUE: what stands in quotes, without them.

    A word stays as it is if Hydra reads something else than one text, or cannot read it.
    """
    try:
        text = text_value(word)
    except HydraException:
        return word
    return word if text is None else f"{word.partition('=')[0]}={text}"


def check_shape(arguments: Sequence[str], groups: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a word that is not an override or option, and for a key that is given twice."""
    before = ""
    for word in arguments:
        option = word.partition("=")[0]
        if word.startswith("-"):
            require(option in OPTIONS, f"{option}: no such option; {without_dashes(word, groups)}")
        elif before not in VALUED:
            require(
                not word.startswith("~"), f"{short(word)}: a key cannot be removed from a config; set it: KEY=VALUE"
            )
            key, equals, _ = word.lstrip("+").partition("=")
            require(bool(equals and key), f"{short(word)}: must be GROUP=CHOICE or KEY=VALUE{meant(word, groups)}")
        before = word
    given: dict[str, str] = {}
    for line in overrides_in(arguments):
        first = given.setdefault(key_of(line), line)
        require(first is line, f"{short(first)} and {short(line)}: one key is given twice; leave one of them out")


def overrides_in(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the words KEY=VALUE and GROUP=CHOICE."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        if not word.startswith("-") and before not in VALUED:
            yield word


def meant(word: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return a question with what the user may have meant: a command, a group, or the group of a choice.

    Return '' if none of these has that name.
    """
    if word in COMMANDS:
        return f"; did you mean {COMMANDS[word]}?"
    if word.lstrip("+") in groups:
        return f"; did you mean {assigned(word.lstrip('+'))}?"
    found = next((group for group, choices in groups.items() if word in choices), None)
    return f"; did you mean {assigned(found, word)}?" if found else ""


def without_dashes(word: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return what the user may have meant by an option that does not exist: a group, another option, or a key."""
    option, _, value = word.partition("=")
    key, near = option.lstrip("-").replace("-", "_"), suggest(option, sorted(OPTIONS))
    if key in groups:
        return f"did you mean {assigned(key, value)}?"
    return near if near.startswith("did you") else f"a key has no dashes: {key}={value or 'VALUE'}"


def assigned(group: str, choice: str = "") -> str:
    """Return GROUP=CHOICE as a command has it, with a plus if the group has no default choice."""
    return f"{'+' if group in STARTS else ''}{group}={choice or 'NAME'}"


def key_of(line: str) -> str:
    return line.lstrip("+").partition("=")[0]


def short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
