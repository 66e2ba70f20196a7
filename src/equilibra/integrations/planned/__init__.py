"""Values of integrations that run plans inside another framework: settings, slots, steps. No torch."""
