"""How a module is asked what it computes, and how its method is replaced on the instance."""
