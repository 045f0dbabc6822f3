"""Wait states that AMD's ISA leaves to the program: which are missing in a text of machine code."""
