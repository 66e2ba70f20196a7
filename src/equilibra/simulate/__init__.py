"""Replay a step through a planner and the cost model: a timeline. Token counts are exact, only times are modelled."""
