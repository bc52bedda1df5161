-- Takes a lease, a permit or a share away from its holder; false if it is not that.
-- $1 name, $2 holder, $3 token, $4 why
SELECT /* schema */evict_lock($1::varchar, $2::varchar, $3::bigint, $4::text)
