"""What is measured, and how it is named: one meaning for predicted and measured figures."""
