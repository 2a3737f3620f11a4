"""Works on a store as a whole: checks it, removes what no run needs, copies artifacts to another one."""
