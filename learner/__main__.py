"""`python -m vagen.learner`, which is what torchrun starts on every rank: `torchrun -m vagen.learner run ...`."""

from vagen.learner.cli import app

if __name__ == "__main__":
    app()
