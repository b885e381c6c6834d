"""Name each arm of a set by its differences from the others, numbers included: 'mxfp8 rmsnorm', 'mxfp8 mxnorm_p2 p=4'.

A config group is named by its choice, with key=value for each value that differs from the choice's. Everything else is
named by key=value. Words that no arm needs are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from mxstudy.config.deciding import Kinds, Value, canonical, defaults_of, kinds_in, set_in
from mxstudy.tracking.choices import choices_of, given
from mxstudy.tracking.recipe_changes import changes

PLAIN = ("precision", "norm")  # groups whose choices are clear without the group's name
NO_WORDS = {"experiment", "sweep", "debug", "study", "probe", "tracking", "hydra_defaults"}
Column = tuple[str, ...]  # a word for each arm, '' for an arm that needs none


@dataclass(frozen=True)
class Named:
    """An arm to name: its values that part arms, a flat config of its kind, and the choices that its runs made."""

    values: Mapping[str, Value]
    config: Mapping[str, Any]
    made: Mapping[str, Sequence[str]]

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_in(self.config)

    @cached_property
    def defaults(self) -> Mapping[str, Value]:
        return defaults_of(self.kinds)

    @cached_property
    def chosen(self) -> dict[str, str]:
        """Return the choice of each group: one that gives exactly the group's values if any does, else the one made.

        All choices of PLAIN groups are tried, so the name does not depend on how a user wrote the same config.
        """
        found = {}
        for group in dict.fromkeys([*self.made, *PLAIN]):
            made = self.made.get(group, ())
            tried = [*made, *(choices_of(group) if group in PLAIN else ())]
            exact = [choice for choice in tried if self.is_exact(group, choice)]
            if exact or made:
                found[group] = (exact or made)[0]
        return found

    def is_exact(self, group: str, choice: str) -> bool:
        file, own = given(group, choice), f"{group}."
        if file is None:
            return False
        wanted = {} if group in file else {**self.defaults, **self.values_from(group, choice)}  # null: no values
        return all(wanted.get(key) == self.values.get(key) for key in {*wanted, *self.values} if key.startswith(own))

    def values_from(self, group: str, choice: str) -> dict[str, Value]:
        return values_given(group, choice, self.kinds)

    @cached_property
    def offered(self) -> dict[str, list[Value]]:
        """Return the values by key that its choices give, including the files of experiment and sweep."""
        found: dict[str, list[Value]] = {}
        for group, best in self.chosen.items():
            for choice in {*self.made.get(group, ()), best}:
                for key, value in self.values_from(group, choice).items():
                    found.setdefault(key, []).append(value)
        return found

    def departs(self, key: str) -> bool:
        """Return whether no choice gives the value at a key; without such choices, whether it is not the default."""
        return self.values.get(key) not in self.offered.get(key, [self.defaults.get(key)])

    def changed(self, key: str) -> dict[str, Value]:
        """Return the differences between the value at a key and the choice's, field by field, if it has fields."""
        group = key.partition(".")[0]
        given = self.values_from(group, self.chosen[group]).get(key) if group in self.chosen else None
        return changes(self.values.get(key), given)

    def assigned(self, key: str, word: str, text: str) -> str:
        """Return 'word=text', or 'field=value' for each field of a recipe that differs from the choice's."""
        fields = self.changed(key).items()
        return ",".join(f"{field}={text_of(value)}" for field, value in fields) or f"{word}={text}"


@cache
def values_given(group: str, choice: str, kinds: Kinds) -> dict[str, Value]:
    """Return the values that a choice sets in configs of these kinds. The dict is shared: do not change it."""
    return canonical(set_in(given(group, choice) or {}, kinds))


def names_of(arms: Sequence[Named]) -> list[str]:
    """Return a name for each arm; all are different, and none is empty."""
    if len(arms) == 1:
        return [title_of(arms[0])]
    keys = dict.fromkeys(key for arm in arms for key in arm.values)
    differing = [key for key in keys if len({repr(arm.values.get(key)) for arm in arms}) > 1]
    groups = group_columns(arms, differing)
    columns = [*groups.values(), *key_columns(arms, differing, covered(arms, groups))]
    if not tells_apart(columns):
        columns = [*groups.values(), *key_columns(arms, differing, set())]
    for column in reversed(columns):
        fewer = [other for other in columns if other is not column]
        columns = fewer if tells_apart(fewer) else columns
    return words_joined(columns)


def words_joined(columns: Sequence[Column]) -> list[str]:
    return [" ".join(filter(None, words)) for words in zip(*columns, strict=True)]


def tells_apart(columns: Sequence[Column]) -> bool:
    names = words_joined(columns)
    return bool(names) and all(names) and len({*names}) == len(names)


def group_columns(arms: Sequence[Named], differing: Sequence[str]) -> dict[str, Column]:
    """Return a column of choices for each group whose choices differ, and for PLAIN groups whose values differ."""
    made = dict.fromkeys(group for arm in arms for group in arm.chosen if group not in NO_WORDS)
    columns = {}
    for group in sorted(made, key=lambda group: (group not in PLAIN, PLAIN.index(group) if group in PLAIN else 0)):
        choices = [arm.chosen.get(group, "") for arm in arms]
        differs = any(key in differing for key in covered(arms, [group]))
        if differs and (len({*choices}) > 1 or group in PLAIN):
            columns[group] = tuple(c if group in PLAIN or not c else f"{group}={c}" for c in choices)
    return columns


def covered(arms: Sequence[Named], groups: Sequence[str] | Mapping[str, Column]) -> set[str]:
    """Return the keys below these groups, and the keys outside of them that their choices set."""
    below = tuple(f"{group}." for group in groups)
    found = {key for arm in arms for key in arm.values if key.startswith(below)}
    return found.union(*(arm.values_from(g, arm.chosen[g]) for arm in arms for g in groups if g in arm.chosen))


def key_columns(arms: Sequence[Named], keys: Sequence[str], blank: set[str]) -> list[Column]:
    """Return a column of key=value for each key, or '' where a key of `blank` has the value that a choice gives."""
    columns = []
    for key in keys:
        texts = texts_of([arm.values.get(key) for arm in arms])
        word = short_key(key, keys)
        columns.append(
            tuple(
                "" if key in blank and not arm.departs(key) else arm.assigned(key, word, text)
                for arm, text in zip(arms, texts, strict=True)
            )
        )
    return columns


def short_key(key: str, keys: Sequence[str]) -> str:
    """Return the shortest ending of a dotted key that no other key has: 'lr' of 'optimizer.lr'."""
    words = key.split(".")
    ends = (".".join(words[-count:]) for count in range(1, len(words)))
    return next((end for end in ends if not any(f".{k}".endswith(f".{end}") for k in keys if k != key)), key)


def texts_of(values: Sequence[Value]) -> list[str]:
    """Return the values as text, different for different values; paths are reduced to the parts that differ."""
    if all(isinstance(value, str) and "/" in value for value in values):
        return differing_parts([str(value) for value in values])
    short, distinct = [text_of(value) for value in values], len({repr(value) for value in values})
    return short if len({*short}) == distinct else [repr(value) for value in values]


def text_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        is_sequence = not value or isinstance(value[0], tuple)
        return f"[{','.join(text_of(part) for _, part in value)}]" if is_sequence else str(value)
    if isinstance(value, str) and not value.isprintable():
        return repr(value)  # a line break would cut a row of a table in two
    return number_text(value) if isinstance(value, float) else str(value)


def number_text(value: float) -> str:
    """Return the number with six digits, or with as many as an exact reading needs: '2', '2.000001', '1234567'."""
    return next(text for digits in range(6, 18) if float(text := f"{value:.{digits}g}") == value)


def differing_parts(paths: Sequence[str]) -> list[str]:
    """Return each path without the first and the last parts that all share."""
    parts = [path.strip("/").split("/") for path in paths]
    shortest = min(map(len, parts))

    def shared(of: Sequence[Sequence[str]]) -> int:
        return next((n for n in range(shortest) if len({tuple(one[: n + 1]) for one in of}) > 1), shortest)

    first = min(shared(parts), shortest - 1)
    last = min(shared([one[::-1] for one in parts]), shortest - 1 - first)
    return ["/".join(one[first : len(one) - last]) for one in parts]


def title_of(arm: Named) -> str:
    """Return the name of a single arm: its PLAIN choices with their changes, else checkpoint or experiment."""
    words = []
    for group in PLAIN:
        keys = [key for key in arm.values if key.startswith(f"{group}.")]
        own = [arm.chosen[group]] if group in arm.chosen and arm.chosen[group] != "as_trained" else []
        changed = [key for key in keys if arm.departs(key)]
        said = (arm.assigned(key, short_key(key, keys), text_of(arm.values[key])) for key in changed)
        words += [*own, *said] if own else []
    of_what = [str(value) for key in ("checkpoint", "parent") if (value := arm.values.get(key))]
    return " ".join(words or of_what or arm.made.get("experiment", ())) or "unnamed"
