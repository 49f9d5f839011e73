"""OpenAI's HTTP interface: translates requests to the protocol, and events to answers."""
