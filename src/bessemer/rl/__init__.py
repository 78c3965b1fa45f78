"""Reinforcement learning: prompts, rollouts, rewards, and the trainer that uses them."""
