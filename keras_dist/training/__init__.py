"""Training with Keras: the optimizer, the reduction of gradients, replicas and saved models."""
