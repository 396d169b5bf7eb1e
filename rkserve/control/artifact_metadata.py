"""What senders said of the files in the head's store that the files themselves do not tell: which
tensors are in them, what they were trained on, and as which versions of base weights they go.

It knows contents by their sha256, and keeps what is said of each in a file of its own.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rkserve.core.desired_state import Artifact
from rkserve.core.durable_files import sync, write_private
from rkserve.core.errors import ArtifactRefused, RequestError
from rkserve.models.tensors import Parameter, read_parameters

log = logging.getLogger(__name__)

FOLDER = ".facts"
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one content. An empty tuple, or None, was not said.

    ``labels`` are the ``<model>@<version>`` under which it is base weights.
    """

    parameters: tuple[Parameter, ...] = ()
    base_digest: str | None = None
    labels: tuple[str, ...] = ()

    def with_more(self, other: Facts) -> Facts:
        """Return it with what was said later, which stands where both say something."""
        return Facts(
            other.parameters or self.parameters,
            other.base_digest or self.base_digest,
            tuple(dict.fromkeys((*self.labels, *other.labels))),
        )


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """An artifact that can be served: its content, and the tensors that are said to be in it."""

    version: Artifact
    parameters: tuple[Parameter, ...] = ()


@dataclass
class FactsFolder:
    """The facts of all contents, in ``folder``. Any thread may use it; looking costs no disk."""

    folder: Path
    _known: dict[str, Facts] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, present: tuple[str, ...]) -> None:
        """Read what is known of the contents that are there, and forget the rest.

        Raises ``OSError`` where the folder cannot be used. A file in it that cannot be read is
        logged and forgotten, so that a damaged one stops nothing: its sender tells its facts again.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            digest = file.name.removesuffix(SUFFIX)
            if digest not in present or not file.name.endswith(SUFFIX):
                _discard(file)
                continue
            try:
                self._known[digest] = _read(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, RecursionError, ValueError, KeyError, TypeError, RequestError) as exc:
                log.warning("%s is not what was written, and is forgotten: %s", file, exc)
                _discard(file)

    def of(self, digest: str) -> Facts:
        """Return what is known of a content."""
        return self._known.get(digest, Facts())

    def labelled(self, label: str) -> str | None:
        """Return the digest of the base weights of that ``<model>@<version>``."""
        known = list(self._known.items())
        return next((digest for digest, facts in known if label in facts.labels), None)

    def add(self, digest: str, said: Facts) -> None:
        """Remember what was said of a content.

        Raises:
            ArtifactRefused: a label stands for another content.
            OSError: it cannot be written down, and is not remembered.
        """
        with self._lock:
            for label in said.labels:
                other = self.labelled(label)
                if other not in (None, digest):
                    raise ArtifactRefused(
                        f"'{label}' is another content (sha256 {str(other)[:12]}...): give the new "
                        "one another version.",
                        "version",
                    )
            facts = self.of(digest).with_more(said)
            if facts == self.of(digest):
                return
            self._write(digest, facts)
            self._known[digest] = facts

    def forget(self, digest: str) -> None:
        """The content is gone, and so is what was said of it, also where its file is damaged."""
        with self._lock:
            self._known.pop(digest, None)
            _discard(self.folder / f"{digest}{SUFFIX}")

    def _write(self, digest: str, facts: Facts) -> None:
        place = self.folder / f"{digest}{SUFFIX}"
        fresh = place.with_suffix(".new")
        write_private(fresh, json.dumps(asdict(facts)))
        sync(fresh)
        fresh.replace(place)
        sync(self.folder)


def _discard(file: Path) -> None:
    """Remove a file; one that cannot be removed is left, and is of no content that is there."""
    try:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("%s cannot be removed: %s", file, exc.strerror or exc)


def _read(content: Any) -> Facts:
    found = Facts(
        read_parameters(content["parameters"], "parameters"),
        content["base_digest"],
        tuple(content["labels"]),
    )
    if not all(isinstance(one, str) for one in found.labels):
        raise TypeError("a label is no string")
    return replace(found, base_digest=None if found.base_digest is None else str(found.base_digest))
