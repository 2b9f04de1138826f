"""What a person reads about runs, made from plans and events."""
