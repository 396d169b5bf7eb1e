"""Writes the dashboards and the alert rules; ``--check`` only compares them.

``--ttft`` and ``--queue-wait`` are the objectives of a cluster whose configuration has others than
the defaults; ``--into`` is another folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from observability.alerts import alert_rules
from observability.dashboards import DASHBOARDS
from rkserve.config.router import ObjectivesConfig

FOLDER = Path(__file__).resolve().parent


def files(objectives: ObjectivesConfig | None = None) -> dict[str, str]:
    """Return the generated files by their paths below ``observability/``."""
    found = {
        f"grafana/{name}.json": json.dumps(dashboard.json(), indent=1, ensure_ascii=False) + "\n"
        for name, dashboard in DASHBOARDS.items()
    }
    return {**found, "prometheus/alerts.yaml": alert_rules(objectives)}


def main() -> int:
    """Write or compare the files. Returns the exit code."""
    defaults = ObjectivesConfig()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--into", type=Path, default=FOLDER, help="another folder")
    parser.add_argument("--ttft", type=float, default=defaults.ttft_s, help="seconds")
    parser.add_argument("--queue-wait", type=float, default=defaults.queue_wait_s, help="seconds")
    given = parser.parse_args()
    stale = []
    objectives = ObjectivesConfig(ttft_s=given.ttft, queue_wait_s=given.queue_wait)
    for name, text in files(objectives).items():
        file = given.into / name
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        if given.check:
            stale.append(name)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"wrote observability/{name}")
    if stale:
        print(
            f"observability/ is behind the code: {', '.join(stale)}. Run make docs.",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
