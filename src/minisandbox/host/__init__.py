"""What this machine allows (:mod:`.doctor`), and what dead owners left on it (:mod:`.reaper`)."""
