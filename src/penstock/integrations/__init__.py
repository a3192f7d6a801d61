"""How do other libraries get this without changing their code?"""
