"""FrozenLake: Gymnasium's dynamics and pictures, our levels, turns, formats and rewards."""
