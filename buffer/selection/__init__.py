"""What a learner step is trained on: orders, filters with refill, replay. Imports without torch."""
