"""Linear layers and decoder layers that launch fewer operations, for GPUs."""
