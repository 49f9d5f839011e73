"""The configuration: `config.toml`, the origin of each setting, and changes while running."""
