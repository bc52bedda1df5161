-- Makes a lease that is held exclusively a shared one of another holder: shared, gone (expired, released
-- or taken over) or skipped (to be tried again: it is fenced, or its row is locked).
-- $1 name, $2 holder, $3 token, $4 the holder that shares it, $5 ttl in milliseconds
SELECT /* schema */pgxlock_share_held($1::text, $2::text, $3::bigint, $4::text, $5::bigint)
