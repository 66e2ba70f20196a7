"""What rows, copies and moves cost."""
