-- Records how an attempt ended; false if another one was started since.
-- $1 key, $2 slot, $3 holder, $4 succeeded, failed or withdrawn, $5 why it failed
SELECT /* schema */pgxlock_finish_run($1::text, $2::timestamptz, $3::text, $4::text, $5::text)
