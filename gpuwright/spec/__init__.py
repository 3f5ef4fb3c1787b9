"""Node descriptions: loading, validation, errors with file and line."""
