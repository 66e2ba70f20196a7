"""Reinforcement learning around the runtime: rollout, reward, advantage, loss, learner, loop. Needs torch."""
