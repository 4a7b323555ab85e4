"""How well memory is estimated: a zoo of training scripts, what each really took on a GPU, and the comparison."""
