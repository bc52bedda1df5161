-- $1 1, or 2 for a pair of numbers, $2 the number, $3 the session, $4 the token
SELECT /* schema */assert_advisory_lock_held($1::integer, $2::bigint, $3::bigint, $4::bigint)
