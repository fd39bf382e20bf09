"""The operators' own schemas: a manifest is held against them, as the API server would do.

`python -m cputrain.cluster.schema FOLDER` makes schemas.json of custom resource definitions. They repeat the pod's
schema and its documentation some thirty times, five megabytes in all. What decides whether a manifest is valid is kept;
equal parts are stored once and referred to by number.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cputrain.cluster.manifest import Problem, Where

Spellings = Mapping[Where, str]
# A schema's types: Python's, what they are called, and what to write.
_TYPES: dict[str, tuple[tuple[type, ...], str, str]] = {
    "object": ((dict,), "a mapping", "write `name: value` in lines below it"),
    "array": ((list,), "a list", "begin each item with `- `"),
    "string": ((str,), "a string", "write one"),
    "boolean": ((bool,), "true or false", "write one of them"),
    "integer": ((int,), "a whole number", "write one"),
    "number": ((int, float), "a whole number", "write one"),
}
# What fields of one release are called in another.
_RENAMED = {"podTemplateOverrides": "runtimePatches", "podSpecOverrides": "runtimePatches"}
# Words of a schema that say what is valid; the rest is documentation, or for the API server's merging.
KEPT = (
    "type", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "nullable",
)  # fmt: skip
_EXTENSIONS = {
    "x-kubernetes-int-or-string": "intOrString",
    "x-kubernetes-preserve-unknown-fields": "anyFields",
    "x-kubernetes-list-map-keys": "uniqueBy",
    "x-kubernetes-embedded-resource": "resource",
}


@dataclass(frozen=True)
class Schemas:
    """Schemas by number, and the number of each `group/version/Kind`."""

    kinds: dict[str, int]
    schemas: list[dict[str, Any]]

    def problems(self, manifest: dict[str, Any], spelt: Spellings | None = None) -> Iterator[Problem] | None:
        """None if the kind isn't known here. `spelt`: numbers and truth values as the file has them (3e-5, yes)."""
        number = self.kinds.get(f"{manifest.get('apiVersion')}/{manifest.get('kind')}")
        return None if number is None else self._problems(manifest, number, (), spelt or {})

    def _problems(self, value: Any, number: int, where: Where, spelt: Spellings) -> Iterator[Problem]:
        schema = self.schemas[number]
        if value is None:  # the API server drops nulls, except in lists
            return
        wrong = _wrong_type(value, schema, spelt.get(where, _yaml(value)))
        if wrong:
            yield Problem(where, wrong)
            return
        yield from (Problem(where, sentence) for sentence in _wrong_value(value, schema))
        if isinstance(value, dict):
            yield from self._in_mapping(value, schema, where, spelt)
        elif isinstance(value, list):
            yield from self._in_list(value, schema, where, spelt)

    def _in_mapping(
        self, value: dict[str, Any], schema: dict[str, Any], where: Where, spelt: Spellings
    ) -> Iterator[Problem]:
        properties = schema.get("properties")
        others = schema.get("additionalProperties")
        for key, item in value.items():
            if where == () and key == "metadata":
                continue  # the API server's own, the same for every kind
            if properties and key in properties:
                yield from self._problems(item, properties[key], (*where, key), spelt)
            elif others is not None:
                yield from self._problems(item, others, (*where, key), spelt)
            elif properties is not None and not schema.get("anyFields"):
                yield Problem((*where, key), f"{key} is not a field that exists here{_likely(key, list(properties))}")
        missing = [key for key in schema.get("required", ()) if value.get(key) is None]
        yield from (Problem(where, f"{key} is missing: write it") for key in missing)

    def _in_list(self, value: list[Any], schema: dict[str, Any], where: Where, spelt: Spellings) -> Iterator[Problem]:
        seen: dict[str, int] = {}
        keys = schema.get("uniqueBy")
        for number, item in enumerate(value):
            if "items" in schema:
                yield from self._problems(item, schema["items"], (*where, number), spelt)
            if keys and isinstance(item, dict):
                named = {key: item[key] for key in keys if key in item}
            elif schema.get("set"):
                named = {"": item}
            else:
                continue
            first = seen.setdefault(json.dumps(named, default=str), number)
            if first != number:
                said = ", ".join(f"{key} {each}".strip() for key, each in named.items())
                said += f" stands in item {first + 1} already, and each may stand once: remove one"
                yield Problem((*where, number), said)


def _wrong_type(value: Any, schema: dict[str, Any], text: str) -> str | None:
    """`text`: the value as the file has it."""
    scalar = not isinstance(value, (dict, list))
    quoted = f'; write it in quotes: "{text}"' if scalar else ""
    found = text if scalar and not isinstance(value, str) else _shown(value)
    if schema.get("intOrString"):
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return None
        return f"it must be a whole number or a string, found {found}{quoted}"
    wanted = schema.get("type")
    if wanted is None:
        return None
    types, called, remedy = _TYPES[wanted]
    if isinstance(value, types) and (wanted == "boolean") == isinstance(value, bool):
        return None
    remedy = (quoted if wanted == "string" else "") or f"; {remedy}"
    if wanted == "integer" and isinstance(value, str) and value.isdecimal():
        remedy = "; write it without quotes"
    return f"it must be {called}, found {found}{remedy}"


def _wrong_value(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        near = difflib.get_close_matches(str(value), map(str, schema["enum"]), n=1)
        remedy = f"; did you mean {near[0]}?" if near else ": write one of those"
        yield f"it must be one of {', '.join(map(str, schema['enum']))}, found {_shown(value)}{remedy}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        remedy = _quantity_remedy(value) or f"; it must match {schema['pattern']}"
        yield f"{_shown(value)} doesn't have the form that is asked for here{remedy}"
    for low, high, size in (
        ("minimum", "maximum", value if isinstance(value, (int, float)) else None),
        ("minLength", "maxLength", len(value) if isinstance(value, str) else None),
        ("minItems", "maxItems", len(value) if isinstance(value, list) else None),
        ("minProperties", "maxProperties", len(value) if isinstance(value, dict) else None),
    ):
        if size is not None and low in schema and size < schema[low]:
            yield f"it must be at least {schema[low]}, found {size}: raise it"
        if size is not None and high in schema and size > schema[high]:
            yield f"it must be at most {schema[high]}, found {size}: lower it"


def _likely(key: str, known: list[str]) -> str:
    if _RENAMED.get(key) in known:
        return f": it is called {_RENAMED[key]} now, and looks like a runtime; write that"
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower(), lower, n=1, cutoff=0.75)
    return f"; did you mean {lower[near[0]]}?" if near else ": remove it"


def _quantity_remedy(value: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKmMgGtT])i?[bB]", value)
    return f"; write {found[1]}{found[2].upper()}i" if found else ""


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = _yaml(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@cache
def of_operators() -> Schemas:
    """Training operator 1.9.4, MPI operator 0.8.2, Trainer 2.3.0 and JobSet 0.12.0, as `main` made them."""
    data = json.loads(Path(__file__).with_name("schemas.json").read_text())
    return Schemas(data["kinds"], data["schemas"])


class Parts:
    """Schemas by number, each once."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def number(self, schema: dict[str, Any]) -> int:
        """The number under which this schema is stored, with all that is within it."""
        made: dict[str, Any] = {key: schema[key] for key in KEPT if key in schema}
        made |= {short: schema[key] for key, short in _EXTENSIONS.items() if schema.get(key)}
        if schema.get("x-kubernetes-list-type") == "set":
            made["set"] = True
        if "properties" in schema:
            made["properties"] = {name: self.number(part) for name, part in schema["properties"].items()}
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict):
                made[key] = self.number(schema[key])
        text = json.dumps(made, sort_keys=True)
        if text not in self._numbers:
            self._numbers[text] = len(self.schemas)
            self.schemas.append(made)
        return self._numbers[text]


def compact(definitions: list[dict[str, Any]]) -> dict[str, Any]:
    """`{"kinds": {"group/version/Kind": number}, "schemas": […]}` of custom resource definitions."""
    parts, kinds = Parts(), {}
    for definition in definitions:
        spec = definition["spec"]
        for version in spec["versions"]:
            name = f"{spec['group']}/{version['name']}/{spec['names']['kind']}"
            kinds[name] = parts.number(version["schema"]["openAPIV3Schema"])
    return {"kinds": kinds, "schemas": parts.schemas}


def main(folder: Path, target: Path) -> None:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe")
    made = compact([yaml.load(file.read_text()) for file in sorted(folder.glob("*.yaml"))])
    rows = ",\n".join(json.dumps(schema, separators=(",", ":"), sort_keys=True) for schema in made["schemas"])
    kinds = json.dumps(made["kinds"], indent=1, sort_keys=True)
    target.write_text(f'{{"kinds": {kinds},\n"schemas": [\n{rows}\n]}}\n')
    print(f"{target}: {len(made['kinds'])} kinds, {len(made['schemas'])} schemas, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).with_name("schemas.json"))
