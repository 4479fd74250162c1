"""Running training scripts as they are: under the guard, in short trials, in stages."""
