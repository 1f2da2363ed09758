"""An experiment that anybody can repeat: a small model learns to repair bugs, by SFT and then by RL in sandboxes."""
