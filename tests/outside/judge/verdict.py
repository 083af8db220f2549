"""Finds what the cache changed, checks it against the allowed list, and makes the tables."""

import fnmatch
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]  # the plug-in's result for one family in one way
KINDS = (
    "test",  # a test passes unwrapped, but not now
    "plain",  # an output differs from the plain model's
    "repeat",  # an output differs from the same call's before
    "unwrap",  # a model could not be unwrapped
    "no hit",  # a class never hit
    "refused",  # a class could not be wrapped
    "error",  # the cache failed and the model computed
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference that the cache made."""

    family: str
    way: str
    kind: str
    where: str  # class of the model, or the test
    text: str


@dataclass(slots=True)
class Allowed:
    """An entry of the allowed list; all its shell patterns must match."""

    reason: str
    kind: str
    family: str = "*"
    way: str = "*"
    where: str = "*"
    text: str = "*"
    n_used: int = field(default=0, compare=False)

    def covers(self, finding: Finding) -> bool:
        """Whether this entry matches the finding; counts the matches."""
        names = ("family", "way", "kind", "where", "text")
        does = all(fnmatch.fnmatchcase(getattr(finding, name), getattr(self, name)) for name in names)
        self.n_used += does
        return does


def read_allowed(file: Path) -> list[Allowed]:
    """Read the allowed list; every entry must have a reason and a known kind."""
    entries = [Allowed(**one) for one in tomllib.loads(file.read_text(encoding="utf-8")).get("allowed", [])]
    for entry in entries:
        if not entry.reason.strip() or entry.kind not in KINDS:
            raise ValueError(f"{file}: an entry needs a reason, and a kind of {', '.join(KINDS)} (got {entry})")
    return entries


def find(family: str, results: Mapping[str, Result]) -> list[Finding]:
    """Return all that the cache changed in one family; `results`, by way, must include `off`."""
    found: list[Finding] = []
    for way, result in results.items():
        if way not in ("cold", "hit"):
            continue
        found += _find_tests(family, way, results, result)
        found += _find_outputs(family, way, result)
        found += _find_trouble(family, way, result)
    return found


def _find_tests(family: str, way: str, results: Mapping[str, Result], result: Result) -> Iterable[Finding]:
    """Yield tests that fail now, but pass unwrapped and, if that was run, with every call made twice."""
    twice = results.get("twice", {}).get("outcomes", {})
    for test, outcome in results["off"]["outcomes"].items():
        now = result["outcomes"].get(test, "missing")
        if outcome == "passed" and now != "passed" and twice.get(test) != "failed":
            message = result["messages"].get(test, now).splitlines()
            errors = [line[1:].strip() for line in message if line.startswith("E ")]
            yield Finding(family, way, "test", test, (errors or message[-1:] or [now])[0])


def _find_outputs(family: str, way: str, result: Result) -> Iterable[Finding]:
    """Yield one finding for each class, kind and field, with the tests that showed it."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in result["differences"]:
        place = re.sub(r"\.\d+\.(keys|values)$", ".K/V", one["field"])  # of all layers
        groups.setdefault((one["class"], one["kind"], place), []).append(one)
    for (name, kind, place), ones in sorted(groups.items()):
        tests = sorted({one["test"].split("::")[-1] for one in ones})
        most = max(float(one["most"]) for one in ones)
        text = f"{place}: {len(ones)} times, up to {most:.1e}; {', '.join(tests[:3])}"
        yield Finding(family, way, kind, name, text)


def _find_trouble(family: str, way: str, result: Result) -> Iterable[Finding]:
    for name, why in result["refused"].items():
        yield Finding(family, way, "refused", name, why)
    for name, counts in result["classes"].items():
        if counts.get("errors"):
            yield Finding(family, way, "error", name, f"{counts['errors']} failures were computed around")
        if way == "hit" and counts.get("calls") and not counts["hits"]:
            text = f"{counts['calls']} calls without gradients; bypassed: {_told(counts['bypassed'])}"
            yield Finding(family, way, "no hit", name, text)


def table(family: str, results: Mapping[str, Result]) -> str:
    """Return one family's table: tests passed by way; of way `hit`, hits and bypasses by reason, and calls compared."""
    classes = results["hit"]["classes"].values() if "hit" in results else ()
    told = {"passed": {way: [*result["outcomes"].values()].count("passed") for way, result in results.items()}}
    for name in ("hits", "bypassed"):
        told[name] = sum((Counter(counts[name]) for counts in classes), Counter())
    names = {"calls": "calls", "bit_equal": "as the plain model", "close": "but for rounding", "repeated": "as before"}
    told["calls"] = {what: sum(counts.get(name, 0) for counts in classes) for name, what in names.items()}
    return "\n".join(f"{family:<14} {name:<9} {_told(counts)}" for name, counts in told.items())


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda one: -one[1])) or "none"
