"""The machine: what it supports (:mod:`.doctor`), and cleanup after dead owners (:mod:`.reaper`)."""
