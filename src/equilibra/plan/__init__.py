"""Verbs: from loads to a StepPlan; the baselines; one protocol and registry."""
