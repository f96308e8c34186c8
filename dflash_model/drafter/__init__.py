"""DFlash drafters: the neutral spec, the readers of published forms, the backbone with explicit masks."""
