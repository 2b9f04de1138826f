"""What a run leaves on the disk so that it can go on, and the adapter at its end."""
