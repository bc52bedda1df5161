SELECT position, process, op, write, key, token FROM writes ORDER BY position
