"""EC2 clusters for icom: plan, make, look at, stop, start, tear down. Knows nothing of training (docs/aws.md)."""
