"""OpenAI's HTTP interface: translates requests to the protocol, and events to answers.

The daemon is a `kvd.http.backend.Backend`; this package does not import its actors.
"""
