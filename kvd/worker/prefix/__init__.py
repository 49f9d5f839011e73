"""The prefix cache: checkpoints of prompts, found again by later prompts that begin alike."""
