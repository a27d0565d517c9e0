"""From chunks of hidden states to the loss and its gradients, for any backend."""
