-- $1 name, $2 holder, $3 token
SELECT assert_lock_held($1, $2, $3, true)
