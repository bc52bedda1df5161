SELECT wake_lock_waiter($1)
