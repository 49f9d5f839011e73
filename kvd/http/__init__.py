"""OpenAI's HTTP interface: requests in, messages of the protocol through, answers out.

Knows the daemon as `kvd.http.port.Backend` and nothing of its actors.
"""
