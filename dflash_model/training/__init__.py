"""Training a DFlash drafter: the forward of a step, its loss and metrics, and the pipeline that feeds it."""
