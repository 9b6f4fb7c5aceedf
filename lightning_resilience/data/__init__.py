"""Where training stands in its data, and how to come back to it exactly."""
