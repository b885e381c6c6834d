"""Say in one line what is wrong with a command and what would be right, instead of Hydra's own messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from mxstudy.compat.hydra import (
    CHOSEN_ALREADY,
    NAMED_IN,
    NOTHING_TO_OVERRIDE,
    OVERRIDES_BELOW_ITSELF,
    UnreadableFile,
)
from mxstudy.config.conf_folders import CONF, STARTS
from mxstudy.help.answers import belongs_to, is_section, may_be_added
from mxstudy.help.group_choices import groups, visible
from mxstudy.reader import ConfigError, one_line, suggest
from mxstudy.tracking.choices import GLOBAL

AS_TRAINED = "as_trained"
# Groups with the choice as_trained, and a key that each of their other choices sets.
WHOLE = {"precision": "schedule", "norm": "kind"}
# What to do about a file of conf/ itself, of which a user writes none.
RESTORE = "the file comes with mxstudy: restore it from git, or install mxstudy again"
START = "+experiment=NAME or +sweep=NAME"


def explain(error: Exception) -> str:
    """Return what is wrong and what would be right, instead of Hydra's advice to append unknown keys."""
    cause = error.__cause__
    if isinstance(error, UnreadableFile) and cause is not None:
        return f"{error}: cannot be read ({why_unreadable(Path(str(error)), cause)})"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name}: no such choice; {suggest(name, groups().get(group, visible(error.options)))}"
    if isinstance(error, MissingConfigException) and (file := re.search(NAMED_IN, str(error))):
        if "/" not in file[1]:
            return f"{CONF / file[1]}.yaml: its defaults name {error.missing_cfg_file}, which does not exist; {RESTORE}"
        return f"{file[1]}.yaml: its defaults name {unknown_name(error)}"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
        key, names = str(cause.full_key), [name for name in map(str, cause.parent_node) if not name.startswith("_")]
        group, _, part = key.partition(".")
        if not names and group in WHOLE and part and "." not in part:
            return as_a_whole(group, key)
        if (not names and "." in key) or may_be_added(key, str(cause.parent_node.get("kind"))):
            return f"{key}: not in the config yet; write +{key}{'.KEY' * is_section(key)}=VALUE"
        is_last_part = "." not in key and key != "kind"  # nobody sets a kind: groups do
        if is_last_part and (near := full_keys(key, cause.parent_node)):
            return f"{key}: no such key; did you mean {' or '.join(near)}?"
        if owner := belongs_to(key):
            return f"{key}: no such key here; it belongs to {owner}"
        own = [name for name in names if name != "hydra"] or list(groups())
        return f"{key}: no such key; {suggest(str(cause.key), own)}"
    for pattern, advice in ADVICE.items():
        match = re.search(pattern, str(error))
        if match:
            return f"{match[1]}: {advice(match[1])}"
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        if followed := re.search(FOLLOWS_NULL, str(error)):
            return f"{error.full_key}: copies {followed[1]}, which is null now; write {error.full_key}=VALUE as well"
        return f"{error.full_key}: {str(error).splitlines()[0]}"
    return " ".join(one_line(part) for part in (error, cause) if part is not None)


def full_keys(key: str, config: DictConfig) -> list[str]:
    """Return the keys of the config's sections whose last part is `key`: optimizer.lr for lr."""
    sections = {name: node for name, node in config.items_ex(resolve=False) if isinstance(node, DictConfig)}
    return [f"{name!s}.{key}" for name, node in sections.items() if name != "hydra" and key in node]


def unknown_name(error: MissingConfigException) -> str:
    """Return what a file's list of defaults names although it does not exist, and what may stand there."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if error.options is not None:
        known = [f"/{own}" for own in groups()]
        return f"the group {group}, which does not exist; {suggest(f'/{Path(group).name}', known)}"
    bases = [Path(base).stem for base in ConfigStore.instance().repo.get(group, {})]
    there = dict.fromkeys([*groups().get(group, ()), *bases])
    advice = f"; {suggest(name, there)}" if there else ""
    return f"{name}, which is no file of {group or 'conf'}; a choice of another group is - /GROUP: CHOICE{advice}"


def why_unreadable(file: Path, error: BaseException) -> str:
    """Return what is wrong in a config file, with the line and column if the error knows them, and what to do."""
    if mark := getattr(error, "problem_mark", None):
        why = f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', 'no YAML')}"
        advice = "write YAML: each KEY: VALUE once, indented by spaces"
    elif isinstance(error, UnicodeDecodeError):
        why, advice = one_line(error), "save it as UTF-8"
    else:
        why, advice = one_line(error), "write KEY: VALUE, and as defaults a list of - GROUP: CHOICE"
    return f"{why}; {RESTORE if file.parent == CONF else advice}"


def as_a_whole(group: str, key: str) -> str:
    """Return the message that a part of an as_trained group can be changed only by choosing the whole group."""
    return (
        f"{key}: {group}={AS_TRAINED} takes the checkpoint's own as a whole; choose one by name, then change its "
        f"values: {group}=NAME {key}=VALUE"
    )


def nothing_to_run(values: Iterable[str], choices: Mapping[str, str]) -> str:
    """Return the message for a command without a run; for `+experimant=NAME`, name the group that was meant.

    `values`: the keys of its config. `choices`: what it chose, by group.
    """
    for group in ("experiment", "sweep"):
        if group in choices:
            advice = f"begin it with '{GLOBAL}', and its defaults with - /study: NAME"
            return f"{group}={choices[group]}: its file names no kind of run; {advice}"
    for key in values:
        for near in difflib.get_close_matches(key, STARTS, n=1):
            return f"{key}: no such key; did you mean '+{near}'?"
    return f"nothing to run; start from {START}"


def nothing_to_replace(group: str) -> str:
    """Return what to write instead of an override of a group that has no choice yet."""
    if group in STARTS:
        return f"write +{group}=NAME, with a plus"
    if group in groups():
        of = f" ({owner})" if (owner := belongs_to(group)) else ""
        return f"there is no choice to replace; start from {START}, one that has {group}{of}"
    return f"no such group; {suggest(group, groups())}"


# OmegaConf's message for '${..dgrad_dh.rounding}' where dgrad_dh=null.
FOLLOWS_NULL = r"Error trying to access (\S+): node `\w+` is not a container"

# Patterns of Hydra's messages, with the text that follows the group's name in our message.
ADVICE: dict[str, Callable[[str], str]] = {
    OVERRIDES_BELOW_ITSELF: lambda name: f"its choices would stand below a key of their own; begin it with '{GLOBAL}'",
    NOTHING_TO_OVERRIDE: nothing_to_replace,
    CHOSEN_ALREADY: lambda group: f"is chosen already; write {group}=NAME, without a plus",
}
