"""Values of integrations that run plans inside another framework: settings and slots. No torch."""
