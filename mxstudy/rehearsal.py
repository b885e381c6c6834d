"""Turn a composed config into that of a rehearsal: drop keys that its kind of run lacks, and use a small corpus."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mxstudy.reader import type_hints

IN_PLACE_OF = "in_place_of"  # the key of a debug choice below which are the corpus and the tokenizer of rehearsals


def rehearse_data(values: dict[str, Any], overrides: Sequence[str]) -> tuple[str, ...]:
    """Put the debug choice's tokenizer into a config, and its corpus unless an override is about the corpus.

    The user's own files stay, alone or in a blend. A blend keeps its phases and weights, and its corpora their names.
    Return a note on each choice of the overrides that is replaced or changed, and on a blend.
    """
    notes = []
    for group, small in values.get(IN_PLACE_OF, {}).items():
        asked = " ".join(line for line in overrides if re.match(rf"\+*{group}[.@=]", line))
        if asked and group == "data":
            limit = values["max_documents"]
            values[group] = copy.deepcopy(values[group])  # other jobs share it
            for corpus in endless(values[group]):
                corpus["max_documents"] = limit
                notes.append(f"debug: {corpus['name']}, its first {limit} documents; data.max_documents takes others")
        elif group in values:
            if asked and values[group] != small:
                notes.append(f"debug: {asked} is not used; a rehearsal has {group}={small['kind']}")
            if group == "data" and is_own(values[group]):
                continue
            corpora = corpora_of(values[group]) if group == "data" else {}
            replaced = {name for name, corpus in corpora.items() if not is_own(corpus)}
            if replaced:
                notes.append(
                    f"debug: {small['kind']} stands in for each corpus of the blend: {', '.join(sorted(replaced))}"
                )
            values[group] = values[group] | {"corpora": corpora | dict.fromkeys(replaced, small)} if corpora else small
    return tuple(notes)


def stand_ins(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the choice of each group whose whole section is the debug choice's, whatever the experiment has chosen."""
    return {group: small["kind"] for group, small in values.get(IN_PLACE_OF, {}).items() if values.get(group) == small}


def is_own(data: Any) -> bool:
    """Return whether a corpus is local files and names them; a choice of data alone does not."""
    return isinstance(data, dict) and data.get("kind") == "files" and isinstance(data.get("paths"), list)


def corpora_of(data: Any) -> dict[str, Any]:
    """Return the corpora of a blend by their names, or {} for anything else."""
    blended = data.get("corpora") if isinstance(data, dict) else None
    return blended if isinstance(blended, dict) else {}


def endless(data: Any) -> Iterator[dict[str, Any]]:
    """Yield each corpus of the hub, alone or in a blend, that has no number of documents."""
    for corpus in corpora_of(data).values() or [data]:
        if isinstance(corpus, dict) and corpus.get("max_documents", 0) is None:
            yield corpus


def without_foreign(values: Mapping[str, Any], cls: Any, rehearsal: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without those that the debug choice has set for other kinds of run than `cls`.

    These are the keys that `cls` lacks, and sections where it has a text, as `checkpoint` of an evaluation. A value
    that the user has set for an unknown key stays, so that it is refused.
    """
    own, kept = type_hints(cls), {}
    for key, value in values.items():
        if key in own and dataclasses.is_dataclass(own[key]) and isinstance(value, dict):
            kept[key] = without_foreign(value, own[key], rehearsal.get(key) or {})
            continue
        is_foreign = key not in own or (own[key] is str and isinstance(value, dict))
        if not is_foreign or rehearsal.get(key, ...) != value:
            kept[key] = value
    return kept
