"""What a machine or a cluster can measure, and what stands in the way."""
