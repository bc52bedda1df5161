SELECT leave_queue($1, $2)
