"""The learner process: batches from the buffer, advantages, losses, Megatron steps, checkpoints and publishes."""
