SELECT assert_shared_lock_held($1, $2, $3)
