"""Examine the machine (:mod:`.doctor`), and track live sandboxes and clean up after dead owners (:mod:`.reaper`)."""
