"""The configuration: `config.toml`, each setting's origin, and changes while the daemon runs."""
