-- Lets acquires and releases commit without waiting for the disk; only until the transaction
-- ends if $1 is true. After session.sql, which raises synchronous_commit.
SELECT pg_catalog.set_config('pgxlock.durability', 'async', $1), pg_catalog.set_config('synchronous_commit', 'off', $1)
