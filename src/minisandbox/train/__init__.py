"""Train models: fine-tune on recorded trajectories, or run on-policy reinforcement learning in sandboxes."""
