"""Evidence from the files of a run: one file per kind, each giving a `Part`."""
