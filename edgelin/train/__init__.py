"""Training: data, loop, schedules, logging."""
