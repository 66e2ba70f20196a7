"""What integrations that run plans inside another framework have in common: counts, slots, groups and steps."""
