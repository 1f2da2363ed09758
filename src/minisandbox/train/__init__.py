"""Train on trajectories: fine-tuning on their rows, and on-policy reinforcement learning in sandboxes."""
