"""The prefix cache: snapshots of prompts, found again by prompts with the same beginning."""
