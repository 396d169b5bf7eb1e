"""The metrics of the Coordinator, built on a registry that is passed in."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from rkserve.core.metrics import CONTROL_BUCKETS_S, makers


class CoordinatorMetrics:
    """Metrics of the Coordinator. Kinds and phases are those of operations.

    ``kinds`` and the ``states`` in which operations end have series from the start: Prometheus
    would not see the first pause of all.
    """

    def __init__(
        self, registry: CollectorRegistry, kinds: Sequence[str] = (), states: Sequence[str] = ()
    ) -> None:
        counter, gauge, histogram = makers(registry)
        self.operations = counter(
            "rkserve_operations",
            "Operations that are over, by kind and how they ended; pauses, resumptions, staging, "
            "rollouts and rollbacks are kinds, 'failed' and 'undone' are failures.",
            ("kind", "state"),
        )
        self.refused = counter(
            "rkserve_operations_refused",
            "Control calls that were refused before they began, by the error's code.",
            ("kind", "code"),
        )
        self.running = gauge("rkserve_operations_running", "Operations that go on now.")
        self.duration = histogram(
            "rkserve_operation_seconds",
            "From a control call's arrival to the end of what it asked for.",
            ("kind",),
            buckets=CONTROL_BUCKETS_S,
        )
        for kind in kinds:
            self.duration.labels(kind)
            for state in states:
                self.operations.labels(kind, state)
        self.phase = histogram(
            "rkserve_operation_phase_seconds",
            "Time that operations spent in one phase, such as staging or switching.",
            ("kind", "phase"),
            buckets=CONTROL_BUCKETS_S,
        )
        self.broadcast = histogram(
            "rkserve_broadcast_seconds",
            "From the broadcast of the desired state to the last board's answer.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.skew = histogram(
            "rkserve_broadcast_skew_seconds",
            "From the first board's answer to the last one's.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.staged_bytes = counter("rkserve_staged_bytes", "Bytes of adapters brought to boards.")
        self.stage = histogram(
            "rkserve_stage_seconds",
            "Time that one adapter took to be on one board's disk, verified.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.board_failures = counter(
            "rkserve_control_failures",
            "Control calls that a board failed or did not answer, by method and error code.",
            ("method", "code"),
        )
        self.reconciled = counter(
            "rkserve_reconciliations",
            "Boards brought to the desired state outside of an operation: joined, restarted, or "
            "left behind by one.",
        )
        self.leases_expired = counter(
            "rkserve_leases_expired",
            "Pauses that ended because they were neither renewed nor resumed in time.",
        )
        self.epoch = gauge("rkserve_desired_epoch", "Epoch of the desired state.")
        self.pauses_in_force = gauge("rkserve_pauses_in_force", "Pauses of parts of the cluster.")
        self.sleeps_in_force = gauge("rkserve_sleeps_in_force", "Sleeps of parts of the cluster.")
        self.boards_drained = gauge(
            "rkserve_boards_drained", "Boards that take no new requests until they are undrained."
        )
        self.idle_unloads = counter(
            "rkserve_idle_unloads",
            "Models that were put to sleep because they were unused, by the operation's result.",
            ("model", "state"),
        )
        self.requested_wakes = counter(
            "rkserve_requested_wakes",
            "Wake-ups of models that a request asked for, by how they ended.",
            ("model", "state"),
        )
        self.behind = gauge("rkserve_boards_behind", "Boards that do not obey that epoch yet.")
        self.backed_up = gauge(
            "rkserve_ledger_backup_timestamp_seconds",
            "When the ledger was last backed up, in seconds since 1970; 0 before the first time.",
        )
        self.copies = gauge(
            "rkserve_ledger_copies",
            "Boards that are there and have a copy of a backup of the ledger.",
        )
        self.copied = gauge(
            "rkserve_ledger_copy_timestamp_seconds",
            "When the backup was made of which boards that are there have the newest copy, in "
            "seconds since 1970; 0 without a copy.",
        )
        self.retrieved = counter(
            "rkserve_retrieved_artifacts",
            "Files that the head's store lacked and got back from boards, by the result.",
            ("result",),
        )
