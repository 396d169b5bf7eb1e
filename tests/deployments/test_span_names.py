"""Names of spans and attributes beside those of OpenTelemetry's own package."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from rkserve.deployments import span_names as names
from tests.support.paths import PROJECT


def test_the_names_are_those_of_the_conventions() -> None:
    modules = (gen_ai_attributes, http_attributes, error_attributes)
    official = {value for one in modules for value in vars(one).values() if isinstance(value, str)}
    ours = [value for value in vars(names).values() if isinstance(value, str)]
    ours += names.PARAMETERS.values()
    conventional = [one for one in ours if one.startswith(("gen_ai.", "http.", "error."))]
    assert len(conventional) > 15
    assert set(conventional) <= official


def test_no_other_module_has_a_name_of_the_conventions() -> None:
    sources = (PROJECT / "rkserve").rglob("*.py")
    found = [path for path in sources if "gen_ai." in path.read_text(encoding="utf-8")]
    assert found == [Path(names.__file__)]
