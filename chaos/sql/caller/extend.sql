SELECT extend_lock($1, $2, $3)
