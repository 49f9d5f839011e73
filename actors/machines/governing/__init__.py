"""How the governor makes room: the parts of `actors.machines.governor`."""
