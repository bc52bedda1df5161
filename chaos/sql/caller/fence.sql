SELECT assert_lock_held($1, $2, $3)
