SELECT extend_shared_lock($1, $2, $3)
