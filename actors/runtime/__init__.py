"""A small actor runtime on asyncio: mailboxes, asks, supervision, alarms, event histories."""
