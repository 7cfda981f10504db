"""References that lead only to themselves are found; recursion that a text can follow passes."""

import pytest

from ddtree.text.schema_refs import check_refs

CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(3000)}
FITTING = [
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
    {"properties": {"x": {"const": {"$ref": "#/properties/x"}}}},
    {"$defs": CHAIN | {"d3000": {"type": "null"}}, "$ref": "#/$defs/d0"},
    {"$ref": "#/nowhere"},
    {"$ref": "http://elsewhere/schema"},
    False,
    5,
]
ENDLESS = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    {"$defs": {"a/b": {"allOf": [{"type": "object"}, {"$ref": "#/$defs/a~1b"}]}}},
    {"type": "array", "items": {"oneOf": [{"$ref": "#/items"}]}},
    {"$defs": CHAIN | {"d3000": {"$ref": "#/$defs/d0"}}},
]


@pytest.mark.parametrize("schema", FITTING, ids=lambda schema: str(schema)[:60])
def test_fitting(schema):
    check_refs(schema)


@pytest.mark.parametrize("schema", ENDLESS, ids=lambda schema: str(schema)[:60])
def test_endless(schema):
    with pytest.raises(ValueError, match=r"\$ref #\S* leads only to itself"):
        check_refs(schema)
