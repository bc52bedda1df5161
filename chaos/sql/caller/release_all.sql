SELECT release_all_locks($1) > 0
