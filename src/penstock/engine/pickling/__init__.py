"""How the user's objects reach a worker, and how its exceptions come back."""
