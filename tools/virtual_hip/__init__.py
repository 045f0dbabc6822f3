"""AMD's own HIP runtime on a machine without an AMD GPU: the emulator, as the GPU that the runtime sees."""
