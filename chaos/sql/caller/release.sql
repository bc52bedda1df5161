SELECT release_lock($1, $2)
