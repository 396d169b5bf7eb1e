"""The application that Ray Serve imports by name, built from the project's own configuration."""

from __future__ import annotations

from importlib import import_module

import pytest
import yaml
from ray import serve

from tests.support.paths import PROJECT


@pytest.mark.parametrize(
    "file", ["serve_config.yaml", "serve_config.vision.yaml", "serve_config.cpu.yaml"]
)
def test_the_import_path_of_the_configuration_builds_the_application(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)  # the paths of models are relative
    (application,) = yaml.safe_load((PROJECT / file).read_text(encoding="utf-8"))["applications"]
    module, _, name = application["import_path"].partition(":")
    built = getattr(import_module(module), name)(application["args"])
    assert isinstance(built, serve.Application)
    assert built._bound_deployment.name == "Router"
