"""Other people's agents and frameworks over sandboxes. Each needs an extra, and only ``cli`` imports them."""
