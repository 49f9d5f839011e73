"""The common fields of messages between daemon and worker (`protocol.worker`)."""

from __future__ import annotations

import msgspec


class CommandBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="c", omit_defaults=True):
    """Base of all commands."""


class ReportBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="r", omit_defaults=True):
    """Base of all reports."""


class RowReportBase(ReportBase, frozen=True, kw_only=True):
    """Base of reports about one request."""

    rid: str
    """The request's id, from its `Submit`."""
