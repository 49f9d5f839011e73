"""The parts of the governor (`actors.machines.governor`)."""
