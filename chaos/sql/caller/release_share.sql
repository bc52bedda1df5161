SELECT release_shared_lock($1, $2)
