"""Makes schemas.json out of custom resource definitions: `python -m cputrain.cluster.derive_schemas FOLDER`.

The definitions repeat the pod's schema and its documentation some thirty times, five megabytes in all. What decides
whether a manifest is valid is kept; equal parts are stored once and referred to by number.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Words of a schema that say what is valid; the rest is documentation, or for the API server's merging.
KEPT = (
    "type",
    "required",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "nullable",
)
_RENAMED = {
    "x-kubernetes-int-or-string": "intOrString",
    "x-kubernetes-preserve-unknown-fields": "anyFields",
    "x-kubernetes-list-map-keys": "uniqueBy",
    "x-kubernetes-embedded-resource": "resource",
}


class Parts:
    """Schemas by number, each once."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def number(self, schema: dict[str, Any]) -> int:
        """The number under which this schema is stored, with all that is within it."""
        made: dict[str, Any] = {key: schema[key] for key in KEPT if key in schema}
        made |= {short: schema[key] for key, short in _RENAMED.items() if schema.get(key)}
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
