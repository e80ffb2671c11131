"""What single steps cost: ``python -m bench.micro``."""
