"""How do the user's objects reach a worker?"""
