"""Other projects' agents and frameworks on our sandboxes. Each needs an extra, and only ``cli`` imports them."""
