"""The base class of pgsieve's errors, and the errors of this package.

A message says which object has which problem. It never contains a password, and of a row it has at most the key.

    PgsieveError
        CatalogNameError              assets.steps.operations.registration
        ClusteringError               assets.steps.validation.layouts
        ConfigError                   pipelines.config.file
        EmbeddedS3Error               resources.lake.stores.embedded_s3
        EmbeddedServerError           resources.postgres.embedded
        EndpointError                 resources.lake.stores.storage
        EngineError                   resources.lake.engine.record
        ExecutorError                 resources.lake.delta.errors
        FilterValueError              decoding.row_filters.strings
        FoldersChangedError           assets.steps.records.subscription_state
        InvalidLsnError               decoding.lsn
        KeyConflictError              assets.steps.apply.key_conflicts
        LakeError                     resources.lake.delta.errors
            ConcurrentWriteError      resources.lake.delta.errors
                OvertakenError        resources.lake.delta.errors
            DamagedTableError         resources.lake.delta.errors
            JobCancelledError         resources.lake.delta.errors
            LakeUnavailableError      resources.lake.delta.errors
                StoreUnavailableError resources.lake.delta.errors
            RefusedTableError         resources.lake.delta.errors
            SparkLostError            resources.lake.delta.errors
        MissingExtraError             pipelines.command_line.extras
        MomentError                   assets.steps.moments.moment
        NewerVersionError             resources.lake.version_guard
        NumericError                  decoding.row_filters.numeric
        OtherClusterError             assets.steps.slot_consumption.slot
        OtherDatabaseError            assets.steps.records.databases
        OutputPluginError             decoding.plugins.interface
            MissingCallbackError      decoding.plugins.interface
            OutputNotAcceptedError    decoding.plugins.interface
            OutputPluginOptionError   decoding.plugins.interface
            OutputTypeError           decoding.plugins.interface
        PasswordCommandError          resources.postgres.password_command
        ProtocolError
        PublicationError              decoding.publications.catalog
            RejectedFilterError       resources.postgres.filter_analysis
        ReplicaIdentityError          decoding.publications.replica_identity
        RowFilterSyntaxError
        SchemaChangedError            decoding.publications.evolution
        SharedFolderError             assets.steps.validation.layouts
        SourceError                   resources.postgres.errors
            EventTriggerError         resources.postgres.ddl
            ForeignServerError        resources.postgres.errors
            LockHeldError             resources.postgres.errors
            SlotError                 resources.postgres.slot
                ChangeLogLostError    assets.steps.slot_consumption.slot
                ServerSetBackError    resources.postgres.slot
                SlotAheadError        resources.postgres.slot
                SlotInUseError        resources.postgres.slot
                SlotInvalidatedError  resources.postgres.slot
                SlotMissingError      resources.postgres.slot
                SlotNotOwnedError     assets.steps.slot_consumption.slot
                SlotStreamLostError   assets.steps.slot_consumption.slot
                TimelineError         resources.postgres.timeline
            SourcePermissionError     resources.postgres.errors
            SourceSettingError        resources.postgres.errors
            SourceUnreachableError    resources.postgres.errors
                SourceSilentError     resources.postgres.errors
            TransientError            resources.postgres.errors
                LockedTableError      resources.postgres.errors
                OpenTransactionsError resources.postgres.waits
                SnapshotLostError     resources.postgres.snapshot
                    AlteredTableError resources.postgres.snapshot
            UndefinedObjectError      resources.postgres.ddl
            UntestedServerError       resources.postgres.errors
        SparkUnavailableError         resources.lake.delta.errors
            JarsUnavailableError      resources.lake.jars
            UnsafeLogStoreError       resources.lake.spark_settings
        StalledError                  pipelines.following.watch
        StopTimeoutError              pipelines.following.watch
        SubscriptionDisabledError     assets.steps.records.subscription_state
        UncheckedFilterError          resources.postgres.filter_analysis
        UndefinedColumnError
        UnreadableConninfoError       resources.postgres.sessions
        UnsafeStoreError              resources.lake.conditional_put_check
        UnsupportedBinaryError
        UnsupportedFilterError
        UnsupportedTypeError
        ValueNotRepresentableError

A class without a module is in this file. Exceptions that never reach a user are not in the tree. In this package
these are `NoOutputError`, `NotColumnarError`, `RefusedError`, `InvalidConstantError` and `InvalidSyntaxError`.
`decoding/row_filters/analysis.py` turns the last three into errors of row filters.
"""

from __future__ import annotations

from collections.abc import Mapping

from pgsieve.decoding.visible import escape_controls

#: Stands for the name of a table in a hint, within a YAML string that has single quotes. A caller that knows the table
#: replaces it by the name, with each single quote doubled.
TABLE_PLACEHOLDER = "<schema>.<table>"


class PgsieveError(Exception):
    """An error that a user can act on.

    `message` says which object has which problem, and `hint` says what the user can do. In both texts control characters
    are escaped. `sqlstate` is PostgreSQL's code for the error, or None (PostgreSQL documentation, PostgreSQL Error
    Codes).
    """

    def __init__(self, message: str, *, hint: str | None = None, sqlstate: str | None = None) -> None:
        self.message = escape_controls(message)
        super().__init__(self.message)
        self.hint = None if hint is None else escape_controls(hint)
        self.sqlstate = sqlstate

    def __str__(self) -> str:
        code = f" [{self.sqlstate}]" if self.sqlstate else ""
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"{self.message}{code}{hint}"


class ProtocolError(PgsieveError):
    """The publisher's bytes violate the logical replication protocol."""


class UnsupportedFilterError(PgsieveError):
    """pgsieve cannot evaluate a row filter exactly as PostgreSQL does."""


class UnsupportedTypeError(PgsieveError):
    """A user chose a Spark type that pgsieve does not offer for the PostgreSQL type of the column."""


class UnsupportedBinaryError(PgsieveError):
    """A value came in binary format, and only the server can print it as text.

    The message has the name of the column, but not the value.
    """


class ValueNotRepresentableError(PgsieveError):
    """The Spark type of a column cannot represent a value.

    The message has the name of the column, but not the value. `value_index` is the index of the value among the values that
    were converted together.
    """

    def __init__(self, message: str, *, hint: str | None = None, value_index: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.value_index = value_index

    def with_key(self, key: Mapping[str, str]) -> ValueNotRepresentableError:
        """Return the error with the key of the row in its message, in the form `(id)=(1)`, as PostgreSQL prints keys."""
        if not key:
            return self
        columns, values = ", ".join(key), ", ".join(key.values())
        message = f"{self.message}, in the row with key ({columns})=({values})"
        return ValueNotRepresentableError(message, hint=self.hint, value_index=self.value_index)


class RowFilterSyntaxError(PgsieveError):
    """A row filter is not an SQL expression or has wrong types, and PostgreSQL refuses it, too."""


class UndefinedColumnError(PgsieveError):
    """A row filter or column list names a column that the relation does not have."""
