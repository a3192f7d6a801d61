"""What should we do here, and why?"""
