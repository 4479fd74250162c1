"""One file per check; see `nanproof.config.check`."""
