"""What makes all ranks act together: failures, votes, policy."""
