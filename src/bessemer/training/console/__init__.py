"""What a run prints: header, progress, final summary."""
