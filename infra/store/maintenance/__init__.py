"""What is done with a store as a whole: check it, remove what no run needs, copy to another one."""
