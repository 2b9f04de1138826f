"""From config, profile and hardware to one frozen, printable plan."""
