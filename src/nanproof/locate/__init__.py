"""Finding the operation that broke a step, by playing it again."""
