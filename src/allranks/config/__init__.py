"""The configuration of a run: schema, loading, validation."""
