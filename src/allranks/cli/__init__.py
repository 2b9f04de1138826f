"""The `allranks` command."""
